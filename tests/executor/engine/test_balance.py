"""Memory moves between pages and experts: no sequence fails because of it, and it does not oscillate."""

from collections import deque
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given, settings

from cpu_offload.memory.arena import Arena
from cpu_offload.memory.balance import Balance
from executor.engine.batch_limits import Limits
from executor.engine.pages import Block, ElasticPages
from executor.engine.request import Request, SamplingParams
from executor.engine.scheduler import Scheduler
from executor.engine.sequence import Sequence, new_sequence

FRAME, PAGE = 256, 4  # bytes, tokens


def sequence_of(index: int, prompt_len: int, new: int) -> Sequence:
    return new_sequence(index, Request((0,) * prompt_len, SamplingParams(max_tokens=new)))


class Host:
    """Stands for the runner: experts fill all slots that they may take, and sequences run to their ends."""

    def __init__(self, frames: int, slot_bytes: int, low: int, high: int, patience: int, pinned_slots: int = 0):
        self.arena = Arena(frames, FRAME, slot_bytes, units=4)
        self.pinned = [self.arena.take_slot() for _ in range(pinned_slots)]
        self.experts: deque[int] = deque()  # slots, the coldest first
        self.departures = self.returns = 0  # extents
        # The direction, and the pages that sequences have or need plus the frames that are kept free in that direction.
        self.moves: list[tuple[str, int]] = []
        self.written: dict[int, tuple[int, int]] = {}  # page -> (sequence, which of its pages)
        self.pages = ElasticPages(self.arena, PAGE, self.arena.slot_frames, self.make_room, self.copy)
        self.balance = Balance(self.arena, low, high, patience, self.make_room, self.pages.gather)

    def held(self) -> int:
        return self.arena.frames - 1 - self.arena.free_frames - self.arena.slot_frames

    def copy(self, old: int, new: int) -> None:
        assert new not in self.written
        self.written[new] = self.written.pop(old)

    def write(self, sequences: list[Sequence]) -> None:
        """Every page is where the list of its holder says, and pages without a holder are not recorded."""
        looked_for = {block.page: (id(s), i) for s in sequences for i, block in enumerate(s.blocks)}
        self.written = {page: what for page, what in self.written.items() if page in looked_for}
        assert self.written.items() <= looked_for.items()
        self.written = looked_for

    def make_room(self, frames: int) -> None:
        before, wanted = self.arena.slot_frames, self.held() + self.arena.free_frames + frames
        for slot in self.arena.leaving(list(self.experts), frames):
            self.experts.remove(slot)
            self.arena.give_slot(slot)
        if self.arena.slot_frames < before:
            self.moves.append(("out", wanted))
            self.departures += (before - self.arena.slot_frames) // self.arena.extent_frames

    def step(self) -> None:
        before = self.arena.slot_frames
        for _ in range(self.balance.step()):
            slot = self.arena.take_slot()
            assert slot is not None  # a slot that was promised is free
            self.experts.append(slot)
        if self.arena.slot_frames > before:
            assert self.arena.free_frames >= self.balance.high
            self.moves.append(("in", self.held() + self.balance.high))
            self.returns += (self.arena.slot_frames - before) // self.arena.extent_frames

    def turns(self) -> int:
        """How often the direction changed. Each time, demand changed by more than high - low: held + high at a return
        is less than held + low, or held + wanted at once, at the evictions before and after it."""
        pairs = [pair for pair in pairwise(self.moves) if pair[0][0] != pair[1][0]]
        for pair in pairs:
            level = dict(pair)
            assert level["in"] < level["out"], self.moves
        return len(pairs)


def run(host: Host, scheduler: Scheduler, arrivals: list[tuple[int, int, int]]) -> list[Sequence]:
    """`arrivals`: (step, prompt length, new tokens)."""
    coming = sorted(arrivals)
    done: list[Sequence] = []
    for step in range(5000):
        while coming and coming[0][0] <= step:
            _, length, new = coming.pop(0)
            scheduler.add(sequence_of(len(coming), length, new))
        scheduler.admit()
        host.step()
        host.pages.gather() if step % 3 == 0 else None
        scheduler.reserve(scheduler.running)
        host.write(scheduler.running)
        for s in scheduler.running:
            s.num_computed = len(s.ids)
            s.ids.append(0)
            s.finish_reason = "length" if len(s.generated) == s.request.sampling.max_tokens else ""
        done += scheduler.retire()
        host.write(scheduler.running)
        if not (coming or scheduler.waiting or scheduler.running):
            return done
    raise AssertionError("some wait for ever")


arrivals = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=32)


@settings(deadline=None)
@given(
    arrivals, st.integers(14, 60), st.integers(64, 900), st.integers(0, 4), st.integers(1, 8), st.integers(0, 5),
    st.integers(0, 6),
)  # fmt: skip
def test_sequences_never_fail_while_experts_hold_memory(
    arrivals: list[tuple[int, int, int]], frames: int, slot_bytes: int, low: int, gap: int, patience: int, pinned: int
) -> None:
    """The longest sequence needs 13 pages. With any watermarks, all sequences end, and memory moves only when demand
    changes."""
    probe = Arena(frames, FRAME, slot_bytes, units=4)
    pinned = min(pinned, (frames - 14) // probe.extent_frames * probe.extent_slots)
    host = Host(frames, slot_bytes, low, low + gap, patience, pinned)
    scheduler = Scheduler(Limits(8, 64, PAGE), (), host.pages)
    done = run(host, scheduler, arrivals)
    assert len(done) == len(arrivals)
    host.turns()
    assert host.held() == 0
    for _ in range(patience + 1):
        host.step()
    arena = host.arena
    assert arena.free_frames < host.balance.high + arena.extent_frames or not arena.free_extents  # experts are back
    returned = host.returns, host.departures
    for _ in range(50):
        host.step()
    assert (host.returns, host.departures) == returned  # and nothing moves in calm


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), max_size=300), st.integers(0, 6), st.integers(1, 10), st.integers(64, 900))
def test_moves_are_bounded_by_swings_of_demand(wanted: list[int], low: int, gap: int, slot_bytes: int) -> None:
    """One holder takes and gives pages at random: experts change direction only when it changes by more than the
    gap."""
    host = Host(50, slot_bytes, low, low + gap, patience=2)
    held: list[Block] = []
    variation = 0
    for change in [0] * 5 + wanted:
        host.step()
        change = max(-len(held), min(change, 49 - len(held)))
        variation += abs(change)
        if change > 0:
            host.pages.extend(held, (len(held) + change) * PAGE)
        elif change < 0:
            host.pages.give(held[change:])
            del held[change:]
    assert host.turns() * (gap + 1) <= variation
