"""Opens the arena: one buffer that KV pages, experts and recurrent states share."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from umbra.base.errors import UserError
from umbra.cpu_offload.manager import ShadowExperts
from umbra.cpu_offload.memory.arena import NO_STATES, Arena, Frame, StateSizes, extent_of
from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.units import MB
from umbra.executor.engine.memory.batch_limits import Limits
from umbra.executor.engine.memory.kv_caches import bind_arena, bind_aside, frame_of, recurrent, sets_of, state_sizes
from umbra.executor.engine.memory.page_memory import PageMemory
from umbra.executor.engine.memory.pages import ElasticPages, Pages
from umbra.models.build import Build


def open_arena(
    case: Case, build: Build, model: nn.Module, shadows: ShadowExperts | None, limits: Limits
) -> tuple[Pages, PageMemory]:
    """Binds the KV caches and states of `model`, and the slots of experts that have shadows, to one buffer. -> the
    pages that sequences take. After the arena the buffer has what the device needs for itself, and a last place for
    the states of padding rows."""
    facts = PLATFORMS[case.platform]
    frame = frame_of(model, case, build)
    slots = (shadows.slot_bytes, shadows.most_slots, shadows.device.alignment) if shadows else (0, 0, 64)
    states = state_sizes(model, frame.nbytes // frame.units)
    least = limits.pages_of(limits.max_sequence_length)
    arena, pinned = make_arena(case, frame, *slots[:2], limits.pages, least, slots[2], states)
    unit = frame.nbytes // frame.units
    spare = -(-facts.spare_slots * slots[0] // unit) * unit + (states.nbytes if facts.padding_states else 0)
    memory, *beside = bind_arena(model, case, build, arena.frames, spare)
    frames = [part[: arena.frames * arena.units].view(arena.frames, -1) for part in (memory, *beside)]
    aside = bind_aside(model, case, build, arena.frames)
    frames += [cache.view(arena.frames, -1) for cache in aside]
    page_memory = _page_memory(model, arena, (memory, *beside), aside)

    def copy(old: int, new: int) -> None:
        for part in frames:
            part[new // arena.units].copy_(part[old // arena.units])

    make_room = shadows.make_room if shadows else lambda frames: None
    pages = ElasticPages(arena, case.cache_config.page_size, pinned, make_room, copy)
    tenants = "KV cache and recurrent states" if states.layers else "KV cache"
    line = f"{arena.frames} frames of {arena.frame_bytes} bytes"
    if shadows:
        shadows.open(arena, memory.view(-1).view(torch.uint8), pages.gather)
        experts = sum(layer.count for layer in shadows.layers)
        tenants = f"experts, {tenants}" if states.layers else f"experts and {tenants}"
        line += (
            f"; {len(shadows.slots)} of {experts} experts on the device, {arena.free_frames} frames free; "
            f"{shadows.device.staging_bytes / 1e6:.1f} MB more for experts that are copied for a prompt"
        )
    if states.layers:
        line += f"; a sequence's states take {arena.set_frames}"
    if frame.beside:
        line += f"; {arena.frames * frame.beside / 1e6:.1f} MB beside it are caches of other sizes"
    print(f"arena: {memory.nbytes / 1e6:.1f} MB that {tenants} share, {line}")
    return pages, page_memory


def _page_memory(model: nn.Module, arena: Arena, buffers: Sequence[Tensor], aside: list[Tensor]) -> PageMemory:
    """`buffers` and `aside` are the caches, as `bind_arena` and `bind_aside` return them."""
    counts = [len(of.layers) for of in sets_of(model)]
    units = [buffer[: arena.frames * arena.units].unflatten(0, (arena.frames, -1)) for buffer in buffers]
    sets = [[of[:, : arena.units // max(counts) * count] for of in units] for count in counts]
    layers = recurrent(model)
    states = buffers[0].view(len(buffers[0]), -1).view(torch.float32) if layers else torch.empty(1, 0)
    return PageMemory([sets[0] + aside, *sets[1:]], arena.units, states, [of.elements for of in layers])


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
