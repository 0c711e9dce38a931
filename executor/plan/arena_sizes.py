"""The sizes of the arena, the buffer that KV pages, experts and recurrent states share."""

from torch import nn

from umbra.base.errors import UserError
from umbra.cpu_offload.memory.arena import NO_STATES, Arena, Frame, StateSizes, extent_of
from umbra.executor.config.case import Case
from umbra.executor.config.units import MB
from umbra.executor.plan.kv_caches import frame_of, state_sizes
from umbra.models.build import Build


def make_arena(
    case: Case,
    frame: Frame,
    slot_bytes: int,
    most_slots: int,
    longest: int,
    least: int,
    alignment: int,
    states: StateSizes = NO_STATES,
) -> tuple[Arena, int]:
    """Returns the arena's bookkeeping, and the number of frames of experts that may not be evicted. `most_slots` is the
    most experts that may be resident at once, `longest` the number of pages of all sequences at their longest, `least`
    that of one."""
    experts = expert_frames(frame.nbytes, slot_bytes, most_slots, states)
    frames = frames_of(case, frame, experts, longest)
    arena = Arena(frames, frame.nbytes, slot_bytes, frame.units, alignment, states)
    pinned = 0 if case.offload_config.mode == "elastic" else experts
    if frames - pinned - 1 < least:
        raise UserError(
            f"case {case.name}: offload_config.arena_mb: {frames} pages of {frame.nbytes} bytes, of which experts keep "
            f"{pinned}, have no room for one sequence of {least} pages: raise it, or lower input_max_len"
        )
    return arena, pinned


def expert_frames(frame_bytes: int, slot_bytes: int, most_slots: int, states: StateSizes = NO_STATES) -> int:
    """Number of frames that `most_slots` resident experts take, beside states of these sizes."""
    if not most_slots:
        return 0
    frames_each, slots_each = extent_of(frame_bytes, slot_bytes, states.nbytes)
    return -(-most_slots // slots_each) * frames_each


def frames_of(case: Case, frame: Frame, experts: int, longest: int) -> int:
    """Number of frames of the arena, of which the case gives the size with what lies beside it. If it leaves that open,
    there are `experts` frames for expert slots, `longest` for KV pages, and one for the page that padding rows are
    written to."""
    return int((case.offload_config.arena_mb or 0) * MB) // (frame.nbytes + frame.beside) or experts + longest + 1


def set_pages_of(model: nn.Module, case: Case, build: Build, slot_bytes: int = 0, alignment: int = 1) -> int:
    """The pages that a set of recurrent states of `model` takes, in an arena with slots of so many bytes."""
    frame = frame_of(model, case, build)
    return state_sizes(model, frame.nbytes // frame.units).frames(frame.nbytes, -(-slot_bytes // alignment) * alignment)
