"""The arena's bookkeeping over random histories: no byte has two holders, and all free memory can be taken."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from umbra.base.errors import UserError
from umbra.cpu_offload.memory.arena import LOST, NO_STATES, Arena, StateSizes, extent_of

UNITS = 4  # two layers


class Histories(RuleBasedStateMachine):
    @initialize(
        frames=st.integers(0, 40),
        frame_bytes=st.integers(1, 12),
        slot_bytes=st.integers(1, 1200),
        state_units=st.integers(0, 14),
        layers=st.integers(1, 5),
    )
    def make(self, frames: int, frame_bytes: int, slot_bytes: int, state_units: int, layers: int) -> None:
        self.unit_bytes = 64 * frame_bytes if state_units else 16 * frame_bytes
        states = StateSizes(state_units * self.unit_bytes, layers) if state_units else NO_STATES
        self.arena = Arena(frames, UNITS * self.unit_bytes, slot_bytes, UNITS, states=states)
        self.pages: list[int] = []
        self.slots: list[int] = []
        self.sets: list[tuple[int, ...]] = []
        self.most_extents = 0  # extents that the largest number of pages so far needed

    def extents_of_pages(self) -> set[int]:
        """Extents that hold pages, without the frames behind the last whole extent."""
        extents = {unit // UNITS // self.arena.extent_frames for unit in self.pages}
        return extents - {self.arena.extents}

    def extents_of_sets(self) -> set[int]:
        return {unit // UNITS // self.arena.extent_frames for places in self.sets for unit in places}

    @precondition(lambda self: self.arena.states.layers)
    @rule()
    def take_states(self) -> None:
        """Wherever there are enough free frames for a set beside a page that stays, gathering makes its extents."""
        arena = self.arena
        whole = arena.extents * arena.extent_frames - arena.slot_frames - len(self.sets) * arena.set_frames
        if (arena.free_frames if self.pages else whole) >= arena.set_frames and whole >= arena.set_frames:
            while arena.lacks_extent:
                moves = dict(arena.gather(self.pages[0]))
                assert moves
                self.pages = [moves.get(page, page) for page in self.pages]
            self.sets.append(arena.take_states())

    @precondition(lambda self: self.sets)
    @rule(data=st.data())
    def give_states(self, data: st.DataObject) -> None:
        free, places = self.arena.free_frames, self.sets.pop(data.draw(st.integers(0, len(self.sets) - 1)))
        self.arena.give_states(places)
        assert self.arena.free_frames == free + self.arena.set_frames

    @rule()
    def take_page(self) -> None:
        before = self.extents_of_pages()
        used = {e: sum(u // UNITS // self.arena.extent_frames == e for u in self.pages) for e in before}
        free, unit = self.arena.free_frames, self.arena.take_page()
        assert (unit is None) == (free == 0)
        if unit is not None:
            assert unit % UNITS == 0
            self.pages.append(unit)
            opened = self.extents_of_pages() - before
            assert not opened or all(count == self.arena.extent_frames for count in used.values())
            extent = unit // UNITS // self.arena.extent_frames
            open_ones = [count for count in used.values() if count < self.arena.extent_frames]
            if extent in used:
                assert used[extent] == max(open_ones)  # the fullest that is not full
        self.most_extents = max(self.most_extents, -(-len(self.pages) // self.arena.extent_frames))

    @rule()
    def take_slot(self) -> None:
        arena = self.arena
        extents = {slot // arena.extent_slots for slot in self.slots}
        free = set(range(arena.extents)) - extents - self.extents_of_pages() - self.extents_of_sets()
        room = len(extents) * arena.extent_slots - len(self.slots)
        assert (room, len(extents) * arena.extent_frames) == (arena.free_slots, arena.slot_frames)
        slot = arena.take_slot()
        assert (slot is None) == (not free and not room)  # whatever was taken and given back before
        if slot is not None:
            assert not room or slot // arena.extent_slots in extents  # no new extent while one has room
            self.slots.append(slot)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def give_page(self, data: st.DataObject) -> None:
        """The first one, like that of padding rows, goes last: it lies behind the last whole extent, if frames do."""
        unit = self.pages.pop(data.draw(st.integers(min(1, len(self.pages) - 1), len(self.pages) - 1)))
        self.arena.give_page(unit)
        with pytest.raises(ValueError, match="not taken"):
            self.arena.give_page(unit)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def gather(self, data: st.DataObject) -> None:
        """The extent with the fewest pages is freed if the others have room; the page that stays is not moved."""
        stays, arena = data.draw(st.sampled_from(self.pages)), self.arena
        free, empty = arena.free_frames, len(arena.free_extents)
        size = arena.extent_frames
        held = {e: sum(u // UNITS // size == e for u in self.pages) for e in self.extents_of_pages()}
        room = arena.free_frames - empty * size  # in extents of pages, the rest among them
        able = {e: count for e, count in held.items() if e != stays // UNITS // size}
        moves = arena.gather(stays)
        assert bool(moves) == bool(able and room >= size)
        assert (arena.free_frames, len(arena.free_extents)) == (free, empty + bool(moves))
        taken = {page for page in self.pages if page // UNITS // size == arena.free_extents[-1]} if moves else set()
        assert {old for old, _ in moves} == taken
        assert not moves or len(moves) == min(able.values())
        assert not {new for _, new in moves} & set(self.pages)  # moves go to pages without a holder
        assert len({new for _, new in moves}) == len(moves)
        self.pages = [dict(moves).get(page, page) for page in self.pages]

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def give_slot(self, data: st.DataObject) -> None:
        slot = self.slots.pop(data.draw(st.integers(0, len(self.slots) - 1)))
        self.arena.give_slot(slot)
        with pytest.raises(ValueError, match="not taken"):
            self.arena.give_slot(slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), frames=st.integers(1, 12))
    def make_room(self, data: st.DataObject, frames: int) -> None:
        """Some slots may not be given back; of the others the coldest extents are emptied, no more than needed."""
        order = data.draw(st.permutations(self.slots))
        order = order[: data.draw(st.integers(0, len(order)))]
        arena, before = self.arena, self.arena.free_frames
        extents = {slot // arena.extent_slots for slot in order}
        able = {e for e in extents if not any(s // arena.extent_slots == e for s in set(self.slots) - set(order))}
        leaving = arena.leaving(order, frames)
        for slot in leaving:
            arena.give_slot(slot)
            self.slots.remove(slot)
        left = {slot // arena.extent_slots for slot in leaving}
        assert arena.free_frames - before == len(left) * arena.extent_frames
        assert len(left) == min(len(able), -(-frames // arena.extent_frames))
        hottest = {e: max(i for i, slot in enumerate(order) if slot // arena.extent_slots == e) for e in able}
        assert all(hottest[a] < hottest[b] for a in left for b in able - left)

    @invariant()
    def no_byte_has_two_holders(self) -> None:
        arena = self.arena
        ranges = [(u // UNITS * arena.frame_bytes, (u // UNITS + 1) * arena.frame_bytes) for u in self.pages]
        ranges += [
            (unit * self.unit_bytes, unit * self.unit_bytes + arena.states.nbytes) for of in self.sets for unit in of
        ]
        starts = [arena.slot_offset(slot) for slot in self.slots]
        assert all(start % 64 == 0 for start in starts)
        ranges += [(start, start + arena.slot_bytes) for start in starts]
        ranges.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert not ranges or (ranges[0][0] >= 0 and ranges[-1][1] <= arena.frames * arena.frame_bytes)

    @invariant()
    def every_frame_has_one_kind_of_tenant(self) -> None:
        arena = self.arena
        assert not self.extents_of_pages() & {slot // arena.extent_slots for slot in self.slots}
        held = len(self.pages) + len(self.sets) * arena.set_frames
        assert arena.free_frames + arena.slot_frames + held == arena.frames
        assert len(self.extents_of_pages()) <= self.most_extents  # pages never hold more extents than that

    def teardown(self) -> None:
        for unit in self.pages:
            self.arena.give_page(unit)
        for slot in self.slots:
            self.arena.give_slot(slot)
        for places in self.sets:
            self.arena.give_states(places)
        arena = self.arena
        assert (arena.free_frames, arena.free_slots, arena.slot_frames) == (arena.frames, 0, 0)
        slots = [arena.take_slot() for _ in range(arena.extents * arena.extent_slots)]
        assert sorted(slots) == list(range(len(slots)))  # type: ignore[type-var]


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=60)


@given(st.integers(1, 4000), st.integers(1, 40_000))
def test_an_extent_loses_little(frame: int, slot: int) -> None:
    frames, slots = extent_of(frame, slot)
    assert slots >= 1
    assert slots * slot <= frames * frame
    few = -(-slot // frame)
    assert few <= frames < few + LOST
    if slots * slot < (1 - 1 / LOST) * frames * frame:  # then no small extent loses less
        sizes = range(few, few + LOST)
        assert slots / frames == max(n * frame // slot / n for n in sizes)


def test_a_page_that_would_leave_slots_unaligned_is_refused() -> None:
    with pytest.raises(UserError, match="page_size: a page of all layers has 96 bytes"):
        Arena(10, 96, 640, UNITS)
    assert Arena(3, 128, 100, UNITS, 128).slot_bytes == 128
    with pytest.raises(UserError, match="must be a multiple of 128"):
        Arena(3, 192, 100, UNITS, 128)
