"""Divides the arena's memory between KV pages and experts while sequences come and go. Bookkeeping only, no tensors.

Experts are evicted when pages need their frames: at once when a page is taken and no frame is free (`ElasticPages`
calls `make_room`), and ahead of demand when fewer than `low` frames are free. Experts return into the frames that are
free beyond `high`, once at least an extent more than `high` has been free for `patience` consecutive steps.

Why this does not oscillate. A return leaves at least `high` frames free. An eviction frees less than an extent beyond
`low`, and a return needs an extent beyond `high`. So between a return and the next eviction, sequences must have taken
more than high - low frames net; between an eviction and the next return, they must have given back more than that.
Without such swings of demand the division does not change, whichever experts become popular: an expert that replaces
another in its slot moves no frame.

If enough frames are free but scattered over extents of pages, `gather` moves pages together, at most one extent's in a
step, so that experts need not wait for sequences to end. It does not change how many frames pages hold.
"""

from collections.abc import Callable

from umbra.cpu_offload.memory.arena import Arena


class Balance:
    def __init__(
        self,
        arena: Arena,
        low: int,
        high: int,
        patience: int,
        make_room: Callable[[int], None],
        gather: Callable[[], object],
    ):
        if not 0 <= low < high:
            raise ValueError(f"low {low} must be below high {high}")
        self.arena, self.low, self.high, self.patience = arena, low, high, patience
        self.make_room, self.gather = make_room, gather
        self.calm = 0  # consecutive steps with room for experts beyond `high`

    def step(self) -> int:
        """To be called once a step, before its pages are taken. -> number of slots that may be taken"""
        arena = self.arena
        if arena.free_frames < self.low and arena.slot_frames:
            self.make_room(self.low - arena.free_frames)
        self.calm = self.calm + 1 if self._beyond() else 0
        if self.calm > self.patience and not arena.free_extents and not arena.free_slots:
            self.gather()
        return self.room()

    def room(self) -> int:
        """Number of slots that may be taken now; fewer than `step` returned if pages were taken since."""
        returning = min(self._beyond(), len(self.arena.free_extents)) if self.calm > self.patience else 0
        return self.arena.free_slots + returning * self.arena.extent_slots

    def _beyond(self) -> int:
        """Number of free frames beyond `high`, counted in whole extents, even if the frames are scattered."""
        return max(0, self.arena.free_frames - self.high) // self.arena.extent_frames
