"""How the arena's memory is divided between KV pages and experts while sequences come and go. Pure bookkeeping.

Experts leave when pages need their frames: at once where a page is taken and none is free (ElasticPages calls
`make_room`), and ahead of that where fewer than `low` frames are free. They return into what is free beyond `high`
frames, after that much has been free for `patience` steps on end.

Why this does not oscillate. Returning experts leave at least `high` frames free, leaving ones free less than an extent
beyond `low`, and nobody returns into less than an extent beyond `high`. So between a return and the next departure
sequences must have taken more than high - low frames net, between a departure and the next return they must have given
back more than that. Without such swings of demand no frame changes its tenant, whatever experts become popular: one
that replaces another in its slot moves no frame.

Where that much is free but scattered in extents of pages, `gather` has pages move together, at most an extent's in a
step, so that experts need not wait for sequences to end. It changes nobody's number of frames.
"""

from collections.abc import Callable

from cpu_offload.memory.arena import Arena


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
        self.calm = 0  # steps on end with room for experts beyond `high`

    def step(self) -> int:
        """Once a step, before its pages are taken. -> how many slots may be taken"""
        arena = self.arena
        if arena.free_frames < self.low and arena.slot_frames:
            self.make_room(self.low - arena.free_frames)
        self.calm = self.calm + 1 if self._beyond() else 0
        if self.calm > self.patience and not arena.free_extents and not arena.free_slots:
            self.gather()
        return self.room()

    def room(self) -> int:
        """How many slots may be taken now; less than `step` said where pages were taken since."""
        returning = min(self._beyond(), len(self.arena.free_extents)) if self.calm > self.patience else 0
        return self.arena.free_slots + returning * self.arena.extent_slots

    def _beyond(self) -> int:
        """As many extents as frames are free beyond `high`, wherever they lie."""
        return max(0, self.arena.free_frames - self.high) // self.arena.extent_frames
