"""How the arena's memory is divided between KV pages and experts while sequences come and go. Pure bookkeeping.

Experts leave when pages need their frames: at once where a page is taken and none is free (ElasticPages calls
`make_room`), and ahead of that where fewer than `low` frames are free. They return into what is free beyond `high`
frames, after that much has been free for `patience` steps on end.

Why this does not oscillate. Returning experts leave at least `high` frames free, leaving ones free less than an extent
beyond `low`, and nobody returns into less than an extent beyond `high`. So between a return and the next departure
sequences must have taken more than high - low frames net, between a departure and the next return they must have given
back more than that. Without such swings of demand no frame changes its tenant, whatever experts become popular: one
that replaces another in its slot moves no frame.
"""

from collections.abc import Callable

from cpu_offload.arena import Arena


class Balance:
    def __init__(self, arena: Arena, low: int, high: int, patience: int, make_room: Callable[[int], None]):
        if not 0 <= low < high:
            raise ValueError(f"low {low} must be below high {high}")
        self.arena, self.low, self.high, self.patience, self.make_room = arena, low, high, patience, make_room
        self.calm = 0  # steps on end with room for experts beyond `high`

    def step(self) -> int:
        """Once a step, before its pages are taken. -> how many slots may be taken until the next one"""
        arena = self.arena
        if arena.free_frames < self.low and arena.slot_frames:
            self.make_room(self.low - arena.free_frames)
        beyond = (arena.free_frames - self.high) // arena.extent_frames
        extents = max(0, min(beyond, len(arena.free_extents)))
        self.calm = self.calm + 1 if extents else 0
        returning = extents if self.calm > self.patience else 0
        return arena.free_slots + returning * arena.extent_slots
