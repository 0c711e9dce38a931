"""Sets up the shadow experts of a case, and the arena that they share with the KV cache."""

import torch
from torch import nn

from cpu_offload.manager import ShadowExperts, ShadowSettings
from cpu_offload.memory.arena import Arena, extent_of
from cpu_offload.planner.choices import Choices
from executor.config.case import Case
from executor.config.units import MB
from executor.engine.kv_caches import bind_arena, frame_of
from executor.engine.pages import ElasticPages, Pages
from executor.platform.base import Platform
from models.build import Build
from models.config import ModelConfig
from ops.cpu.engine import shadow_teams
from ops.cpu.shadow import ShadowPool
from umbra.errors import UserError


def make_shadow_experts(case: Case, choices: Choices, platform: Platform, config: ModelConfig) -> ShadowExperts:
    """Makes the shadow experts of `case`; `config` is the model's config."""
    wanted = case.offload_config
    settings = ShadowSettings(
        mode=wanted.mode,
        start_layer=wanted.start_layer,
        slots=choices.slots.value,
        interval=wanted.interval,
        max_swaps=choices.max_swaps.value,
    )
    pool = ShadowPool(shadow_teams(choices.threads.value[1]), wanted.timeout_s)
    return ShadowExperts(settings, platform.shadow_device(config.experts_per_token, choices.stream_tokens.value), pool)


def open_arena(case: Case, build: Build, model: nn.Module, shadows: ShadowExperts, longest: int) -> Pages:
    """Binds the KV caches of `model` and the expert slots to one buffer. -> the pages that sequences take. `longest` is
    the number of pages that all sequences need at their longest."""
    frame, slots = frame_of(model, case, build), (shadows.slot_bytes, shadows.most_slots)
    arena, pinned = make_arena(case, *frame, *slots, longest, shadows.device.alignment)
    memory = bind_arena(model, case, build, arena.frames, shadows.device.spare(shadows.slot_bytes))
    frames = memory[: arena.frames * arena.units].view(arena.frames, -1)

    def copy(old: int, new: int) -> None:
        frames[new // arena.units].copy_(frames[old // arena.units])

    pages = ElasticPages(arena, case.cache_config.page_size, pinned, shadows.make_room, copy)
    shadows.open(arena, memory.view(-1).view(torch.uint8), pages.gather)
    experts = sum(layer.count for layer in shadows.layers)
    print(
        f"arena: {memory.nbytes / 1e6:.1f} MB that experts and KV cache share, {arena.frames} frames of "
        f"{arena.frame_bytes} bytes; {len(shadows.slots)} of {experts} experts on the device, "
        f"{arena.free_frames} frames free; {shadows.device.staging_bytes / 1e6:.1f} MB more for experts that are "
        "copied for a prompt"
    )
    return pages


def make_arena(
    case: Case, units: int, frame_bytes: int, slot_bytes: int, most_slots: int, longest: int, alignment: int
) -> tuple[Arena, int]:
    """Returns the arena's bookkeeping, and the number of frames of experts that may not be evicted. `most_slots` is the
    most experts that may be resident at once, `longest` the number of pages of all sequences at their longest."""
    experts = expert_frames(frame_bytes, slot_bytes, most_slots)
    frames = frames_of(case, frame_bytes, experts, longest)
    arena = Arena(frames, frame_bytes, slot_bytes, units, alignment)
    pinned = 0 if case.offload_config.mode == "elastic" else experts
    least = longest // (case.data_config.batch_size // case.attn_dp_size)
    if frames - pinned - 1 < least:
        raise UserError(
            f"case {case.name}: offload_config.arena_mb: {frames} pages of {frame_bytes} bytes, of which experts keep "
            f"{pinned}, have no room for one sequence of {least} pages: raise it, or lower input_max_len"
        )
    return arena, pinned


def expert_frames(frame_bytes: int, slot_bytes: int, most_slots: int) -> int:
    """Number of frames that `most_slots` resident experts take."""
    frames_each, slots_each = extent_of(frame_bytes, slot_bytes)
    return -(-most_slots // slots_each) * frames_each


def frames_of(case: Case, frame_bytes: int, experts: int, longest: int) -> int:
    """Number of frames of the arena. If the case leaves its size open, it has `experts` frames for expert slots,
    `longest` for KV pages, and one for the page that padding rows are written to."""
    return int((case.offload_config.arena_mb or 0) * MB) // frame_bytes or experts + longest + 1
