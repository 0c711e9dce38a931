"""Opens the arena: one buffer that KV pages, experts and recurrent states share."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from umbra.cpu_offload.manager import ShadowExperts
from umbra.cpu_offload.memory.arena import Arena
from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.engine.memory.page_memory import PageMemory
from umbra.executor.engine.memory.pages import ElasticPages, Pages
from umbra.executor.plan.arena_sizes import make_arena
from umbra.executor.plan.batch_limits import Limits
from umbra.executor.plan.kv_caches import bind_arena, bind_aside, frame_of, recurrent, sets_of, state_sizes
from umbra.models.build import Build


def open_arena(
    case: Case, build: Build, model: nn.Module, shadows: ShadowExperts | None, limits: Limits
) -> tuple[Pages, PageMemory]:
    """Binds the KV caches and states of `model`, and the slots of experts that have shadows, to one buffer. -> the
    pages that sequences take. After the arena the buffer has what the device needs for itself, and a last place for
    the states of padding rows."""
    frame = frame_of(model, case, build)
    slots = (shadows.slot_bytes, shadows.most_slots, shadows.device.alignment) if shadows else (0, 0, 64)
    states = state_sizes(model, frame.nbytes // frame.units)
    least = limits.pages_of(limits.max_sequence_length)
    arena, pinned = make_arena(case, frame, *slots[:2], limits.pages, least, slots[2], states)
    unit = frame.nbytes // frame.units
    spare = shadows.device.spare_slots * slots[0] if shadows else 0
    spare = -(-spare // unit) * unit + (states.nbytes if PLATFORMS[case.platform].padding_states else 0)
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
