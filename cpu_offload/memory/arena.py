"""Keeps track of the parts of the arena that KV pages, experts and recurrent states hold. Bookkeeping only, no tensors.

The arena is one buffer of `frames` frames that never moves. A frame has room for one KV page of all layers, in units:
of each layer one for keys and one for values, or one for latents. Extents are aligned runs of `extent_frames` frames.
An extent is free, or holds pages (one in each frame), or holds slots (`extent_slots` of them, one expert in each), or
states (of one sequence, each of one layer, from whole units on):

    frames   | 0 1 2 3 4 | 5 6 7 8 9 | 10 11 ...        extents of 5 frames, 3 slots
             | p . p p . | s0 s1 s2 -| . .              p: page, s: slot, -: lost, since sizes do not divide

Fragmentation. A page is one frame, so any free frame serves any page. A slot's position in its extent is fixed, and
pages never share an extent with slots. So a free extent always has room for `extent_slots` slots, whatever was taken
and given back before, and a slot is refused only if no extent is free and no extent of slots has a free one. Pages can
hold extents that they hardly use, but few: they open a new extent only when all of theirs are full, so they never hold
more extents than the most pages at any time needed; and they are taken from the fullest extent, so that thinly used
ones become empty. Slots are taken likewise, so that experts which return gather in few extents. When many sequences
end at once, pages may be left scattered: `gather` empties the extent with the fewest. States of a sequence are a set,
which has whole extents of its own. So a set has a price in pages, and there is room for it wherever there are so many
free frames: gathering pages makes free extents of them.

Ordering. The thread that prepares steps calls all of this, between two steps. Whatever was given back is no longer
accessed: the step that used it has ended, and before a slot is given back, copies into it are complete and its address
is out of the tables. So the next tenant may write at once.
"""

from dataclasses import dataclass
from typing import NamedTuple

from umbra.base.errors import UserError

LOST = 8  # at most 1 / LOST of an extent of slots, or of states, should be lost because sizes do not divide


class Frame(NamedTuple):
    """One frame of the arena. It holds one page of all layers of a set: a unit for each cache of each layer that has
    the size of the first, such as its keys and its values."""

    units: int
    nbytes: int
    beside: int  # bytes of its pages of other caches, which lie beside the arena


@dataclass(frozen=True)
class StateSizes:
    """The sizes of a sequence's recurrent states: `nbytes` in each of `layers` layers, in whole units."""

    nbytes: int = 0
    layers: int = 0

    def frames(self, frame_bytes: int, slot_bytes: int) -> int:
        """The price of a set: the frames of its extents, in an arena of such frames and slots."""
        if not self.layers:
            return 0
        frames, _ = extent_of(frame_bytes, slot_bytes, self.nbytes)
        return -(-self.layers // (frames * frame_bytes // self.nbytes)) * frames


NO_STATES = StateSizes()


def extent_of(frame_bytes: int, slot_bytes: int, state_bytes: int = 0) -> tuple[int, int]:
    """(frames, slots) of an extent: the smallest that loses at most 1 / LOST, whether it holds slots or states, else
    the one that loses the least. A size of 0 stands for no such tenants."""
    sizes = [size for size in (slot_bytes, state_bytes) if size]
    fewest = max((-(-size // frame_bytes) for size in sizes), default=1)
    lost: dict[tuple[int, int], float] = {}
    for frames in range(fewest, fewest + LOST):
        nbytes = frames * frame_bytes
        slots = nbytes // slot_bytes if slot_bytes else 0
        lost[frames, slots] = max((nbytes % size / nbytes for size in sizes), default=0.0)
    return next((size for size, part in lost.items() if part <= 1 / LOST), min(lost, key=lambda size: lost[size]))


class Tenant:
    """The extents of one kind of tenant, pages or slots, each with `places` places."""

    def __init__(self, places: int, free_extents: list[int]):
        self.places, self.free_extents = places, free_extents  # both tenants share the list of free extents
        self.used: dict[int, int] = {}  # extent -> one bit for each place, set if the place is taken
        self.by_count: list[dict[int, None]] = [{} for _ in range(places + 1)]  # extents by number of taken places
        self.free = 0  # free places in this tenant's extents

    def add(self, extent: int, used: int) -> None:
        """Gives the extent to this tenant. `used` has a bit for each place that counts as taken."""
        self.used[extent] = used
        self.by_count[used.bit_count()][extent] = None
        self.free += self.places - used.bit_count()

    def take(self) -> int | None:
        """Takes a place in the fullest extent that is not full, else in a free extent. -> extent * places + place, or
        None if no place is free"""
        if not self.free:
            if not self.free_extents:
                return None
            self.add(self.free_extents.pop(), 0)
        extent = next(next(iter(extents)) for extents in reversed(self.by_count[:-1]) if extents)
        used = self.used[extent]
        bit = (~used & (used + 1)).bit_length() - 1  # the lowest free place
        self._change(extent, 1 << bit)
        self.free -= 1
        return extent * self.places + bit

    def give(self, number: int) -> None:
        """Gives a place back; an extent without taken places becomes free."""
        extent, bit = divmod(number, self.places)
        if not self.used.get(extent, 0) >> bit & 1:
            raise ValueError(f"place {number} is not taken")
        self._change(extent, 1 << bit)
        self.free += 1
        if not self.used[extent]:
            del self.used[extent], self.by_count[0][extent]
            self.free -= self.places
            self.free_extents.append(extent)

    def empty(self, extent: int) -> list[tuple[int, int]]:
        """Frees the extent: takes a place in the other extents, which must have room, for each of its taken places.
        -> (old place, new place) of each"""
        used = self.used[extent]
        del self.by_count[used.bit_count()][extent]  # so that `take` does not choose it
        self.free -= self.places - used.bit_count()
        moves = []
        for bit in range(self.places):
            if used >> bit & 1:
                if (taken := self.take()) is None:
                    raise ValueError(f"extent {extent}: no room in the others")
                moves.append((extent * self.places + bit, taken))
        del self.used[extent]
        self.free_extents.append(extent)
        return moves

    def _change(self, extent: int, bit: int) -> None:
        used = self.used[extent]
        del self.by_count[used.bit_count()][extent]
        self.used[extent] = used ^ bit
        self.by_count[(used ^ bit).bit_count()][extent] = None


class Arena:
    def __init__(
        self,
        frames: int,
        frame_bytes: int,
        slot_bytes: int,
        units: int,
        alignment: int = 64,
        states: StateSizes = NO_STATES,
    ):
        """A frame has `units` units; `alignment` is that of slots, states and frames, in bytes."""
        aligned = frame_bytes // units if states.layers else frame_bytes
        if aligned % alignment:
            raise UserError(
                f"cache_config.page_size: a page of {'a layer' if states.layers else 'all layers'} has {aligned} "
                f"bytes; with {'states' if states.layers else 'experts'} it must be a multiple of {alignment}: choose "
                "a multiple of 16"
            )
        self.frames, self.frame_bytes, self.units = frames, frame_bytes, units
        self.slot_bytes, self.states = -(-slot_bytes // alignment) * alignment, states
        self.set_frames = states.frames(frame_bytes, self.slot_bytes)
        self.extent_frames, self.extent_slots = extent_of(frame_bytes, self.slot_bytes, states.nbytes)
        self.extents, rest = divmod(frames, self.extent_frames)
        self.free_extents = list(range(self.extents - 1, -1, -1))  # taken from the end: low ones first
        self._pages = Tenant(self.extent_frames, self.free_extents)
        self._slots = Tenant(self.extent_slots, self.free_extents)
        if rest:  # the last extent is shorter: only pages use it, and the places it lacks count as taken
            self._pages.add(self.extents, (1 << self.extent_frames) - (1 << rest))

    @property
    def free_frames(self) -> int:
        """Number of pages that could be taken now."""
        return self._pages.free + len(self.free_extents) * self.extent_frames

    @property
    def free_slots(self) -> int:
        """Number of slots that could be taken now without opening another extent."""
        return self._slots.free

    @property
    def lacks_extent(self) -> bool:
        """Says whether no set of states could be taken now, although there may be enough frames."""
        return len(self.free_extents) * self.extent_frames < self.set_frames

    def take_states(self) -> tuple[int, ...]:
        """Takes a set of states, for which there are free extents. -> the first unit of each layer's states"""
        extents = [self.free_extents.pop() for _ in range(self.set_frames // self.extent_frames)]
        layer_units = self.states.nbytes * self.units // self.frame_bytes  # units
        starts = (extent * self.extent_frames * self.units for extent in extents)
        many = self.extent_frames * self.units // layer_units
        return tuple(start + index * layer_units for start in starts for index in range(many))[: self.states.layers]

    def give_states(self, places: tuple[int, ...]) -> None:
        self.free_extents.extend(dict.fromkeys(unit // (self.extent_frames * self.units) for unit in places))

    @property
    def slot_frames(self) -> int:
        """Number of frames in extents of slots."""
        return len(self._slots.used) * self.extent_frames

    def take_page(self) -> int | None:
        """Takes a frame. -> its first unit, which is the page's number in block tables, or None if no frame is free"""
        frame = self._pages.take()
        return None if frame is None else frame * self.units

    def give_page(self, unit: int) -> None:
        self._pages.give(unit // self.units)

    def gather(self, stays: int) -> list[tuple[int, int]]:
        """Frees the extent of pages that needs the fewest moves. -> the moves (from, to), empty if no extent can be
        freed. The caller must copy the pages before it takes anything else. `stays` is a page that may not move."""
        if self._pages.free < self.extent_frames:
            return []
        # Frames after the last whole extent, numbered self.extents, cannot become a free extent.
        still = {self.extents, stays // self.units // self.extent_frames}
        thin = (e for extents in self._pages.by_count[1:] for e in extents if e not in still)
        extent = next(thin, None)
        if extent is None:
            return []
        return [(old * self.units, new * self.units) for old, new in self._pages.empty(extent)]

    def take_slot(self) -> int | None:
        return self._slots.take()

    def give_slot(self, slot: int) -> None:
        self._slots.give(slot)

    def slot_offset(self, slot: int) -> int:
        """The slot's distance from the arena's start, in bytes."""
        extent, index = divmod(slot, self.extent_slots)
        return extent * self.extent_frames * self.frame_bytes + index * self.slot_bytes

    def leaving(self, coldest_first: list[int], frames: int) -> list[int]:
        """The slots to give back so that `frames` more frames are free, or as many as possible. Whole extents are
        emptied, those with the coldest warmest expert first. Slots not in `coldest_first` stay, and so do their
        extents."""
        held = {extent: used.bit_count() for extent, used in self._slots.used.items()}
        leaving: dict[int, list[int]] = {extent: [] for extent in held}
        chosen: list[int] = []
        for slot in coldest_first:
            if frames <= 0:
                break
            extent = slot // self.extent_slots
            leaving[extent].append(slot)
            if len(leaving[extent]) == held[extent]:
                chosen += leaving[extent]
                frames -= self.extent_frames
        return chosen
