"""Who holds which part of the arena: KV pages or experts. Bookkeeping alone; knows no tensors.

The arena is one buffer that never moves, of `frames`. A frame has room for one KV page of all layers, 2 L units: the
keys and the values of one layer each are a unit. Frames lie in extents, aligned runs of `extent_frames` frames.
An extent belongs to nobody, to pages (one each frame) or to slots (`extent_slots`, one expert's matrices each):

    frames   | 0 1 2 3 4 | 5 6 7 8 9 | 10 11 ...        extents of 5 frames, 3 slots
             | p . p p . | s0 s1 s2 -| . .              p: page, s: slot, -: lost between sizes

Fragmentation. A page is one frame, so any free frame serves any page. A slot's place within an extent is fixed, and
pages never stand in an extent of slots: a free extent always has room for `extent_slots` slots, whatever came and went
before, so a slot is refused only if no extent is free and none of slots has a place left. What pages can do is hold
extents that they hardly use. They open a new one only when all of theirs are full, so they hold no more extents than
the most pages that ever were at once need; and they take from the fullest first, so that thinly used ones run empty
instead of living on. Slots do likewise: experts that leave and return gather in few extents. What is still scattered
when many sequences end at once can be gathered: `gather` empties an extent of pages, the one with the fewest.

Ordering. All of this is called between two replays of the step by the one thread that prepares steps. What was given
back is written by nobody any more: the step that used it has ended, an expert's copy is done before its slot is given,
and tables stopped naming it before. So whoever takes it next may write at once.
"""

from errors import UserError

LOST = 8  # at most one part in so many of an extent of slots is to be lost between sizes


def extent_of(frame_bytes: int, slot_bytes: int) -> tuple[int, int]:
    """(frames, slots) of an extent: the smallest that loses little, else the least wasteful of the small ones."""
    fewest = -(-slot_bytes // frame_bytes)
    lost: dict[tuple[int, int], float] = {}
    for frames in range(fewest, fewest + LOST):
        slots = frames * frame_bytes // slot_bytes
        lost[frames, slots] = 1 - slots * slot_bytes / (frames * frame_bytes)
    return next((size for size, part in lost.items() if part <= 1 / LOST), min(lost, key=lambda size: lost[size]))


class Tenant:
    """The extents of one kind of tenant, each of `places` places. Takes from the fullest that is not full."""

    def __init__(self, places: int, free_extents: list[int]):
        self.places, self.free_extents = places, free_extents  # the latter is shared by all tenants
        self.used: dict[int, int] = {}  # extent -> bits, one a place
        self.by_count: list[dict[int, None]] = [{} for _ in range(places + 1)]  # extents with so many places taken
        self.free = 0  # places in its extents

    def add(self, extent: int, used: int) -> None:
        self.used[extent] = used
        self.by_count[used.bit_count()][extent] = None
        self.free += self.places - used.bit_count()

    def take(self) -> int | None:
        """-> extent * places + place"""
        if not self.free:
            if not self.free_extents:
                return None
            self.add(self.free_extents.pop(), 0)
        extent = next(next(iter(extents)) for extents in reversed(self.by_count[:-1]) if extents)
        used = self.used[extent]
        place = (~used & (used + 1)).bit_length() - 1  # the lowest that is free
        self._change(extent, 1 << place)
        self.free -= 1
        return extent * self.places + place

    def give(self, number: int) -> None:
        extent, place = divmod(number, self.places)
        if not self.used.get(extent, 0) >> place & 1:
            raise ValueError(f"place {number} is not taken")
        self._change(extent, 1 << place)
        self.free += 1
        if not self.used[extent]:
            del self.used[extent], self.by_count[0][extent]
            self.free -= self.places
            self.free_extents.append(extent)

    def empty(self, extent: int) -> list[tuple[int, int]]:
        """Takes as many of the places in the other extents, which must have them. -> (place given, place taken)"""
        used = self.used[extent]
        del self.by_count[used.bit_count()][extent]  # nobody takes there
        self.free -= self.places - used.bit_count()
        moves = []
        for place in range(self.places):
            if used >> place & 1:
                if (taken := self.take()) is None:
                    raise ValueError(f"extent {extent}: no room in the others")
                moves.append((extent * self.places + place, taken))
        del self.used[extent]
        self.free_extents.append(extent)
        return moves

    def _change(self, extent: int, bit: int) -> None:
        used = self.used[extent]
        del self.by_count[used.bit_count()][extent]
        self.used[extent] = used ^ bit
        self.by_count[(used ^ bit).bit_count()][extent] = None


class Arena:
    def __init__(self, frames: int, frame_bytes: int, slot_bytes: int, units: int, alignment: int = 64):
        """`units` of a frame: 2 L; `alignment`: bytes, of a slot."""
        if frame_bytes % alignment:
            raise UserError(
                f"cache_config.page_size: a page of all layers has {frame_bytes} bytes; beside experts it must be a "
                f"multiple of {alignment}: choose a multiple of 16"
            )
        self.frames, self.frame_bytes, self.units = frames, frame_bytes, units
        self.slot_bytes = -(-slot_bytes // alignment) * alignment
        self.extent_frames, self.extent_slots = extent_of(frame_bytes, self.slot_bytes)
        self.extents, rest = divmod(frames, self.extent_frames)
        self.free_extents = list(range(self.extents - 1, -1, -1))  # taken from the end: low ones first
        self._pages = Tenant(self.extent_frames, self.free_extents)
        self._slots = Tenant(self.extent_slots, self.free_extents)
        if rest:  # no whole extent: never free for slots, as its missing places count as taken
            self._pages.add(self.extents, (1 << self.extent_frames) - (1 << rest))

    @property
    def free_frames(self) -> int:
        """Pages that could be taken now."""
        return self._pages.free + len(self.free_extents) * self.extent_frames

    @property
    def free_slots(self) -> int:
        """Slots that could be taken now without an extent more."""
        return self._slots.free

    @property
    def slot_frames(self) -> int:
        """Frames that extents of slots hold."""
        return len(self._slots.used) * self.extent_frames

    def take_page(self) -> int | None:
        """The first unit of a free frame: the page's number in block tables."""
        frame = self._pages.take()
        return None if frame is None else frame * self.units

    def give_page(self, unit: int) -> None:
        self._pages.give(unit // self.units)

    def gather(self, stays: int) -> list[tuple[int, int]]:
        """Moves of pages, (from, to), that make one extent free: the fewest; none where that cannot be.
        `stays`: a page that may not move. The caller copies at once, before anybody takes what became free."""
        if self._pages.free < self.extent_frames:
            return []
        still = {self.extents, stays // self.units // self.extent_frames}  # the rest is no extent
        thin = (e for extents in self._pages.by_count[1:] for e in extents if e not in still)
        extent = next(thin, None)
        if extent is None or self._pages.used[extent] == (1 << self.extent_frames) - 1:
            return []
        return [(old * self.units, new * self.units) for old, new in self._pages.empty(extent)]

    def take_slot(self) -> int | None:
        return self._slots.take()

    def give_slot(self, slot: int) -> None:
        self._slots.give(slot)

    def slot_offset(self, slot: int) -> int:
        """In bytes, from the arena's start."""
        extent, place = divmod(slot, self.extent_slots)
        return extent * self.extent_frames * self.frame_bytes + place * self.slot_bytes

    def leaving(self, coldest_first: list[int], frames: int) -> list[int]:
        """Which taken slots must leave for `frames` more free frames, or as many as can be: whole extents, the one
        whose hottest expert is coldest first. Slots that are not listed may not leave, nor their extents be free."""
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
