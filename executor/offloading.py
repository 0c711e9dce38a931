"""Shadow experts of a case: settings, the arena that they share with the KV cache, what a run leaves of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpu_offload.arena import Arena, extent_of
from cpu_offload.offload import Offload, Settings
from errors import UserError
from executor.building import bind_arena, frame_of
from executor.config import Case
from executor.kv_pages import ElasticPages, Pages
from executor.results import write_whole
from models.build import Build

MB = 1 << 20


def make_offload(case: Case) -> Offload | None:
    wanted = case.offload_config
    if wanted.mode == "none":
        return None
    names = [field.name for field in dataclasses.fields(Settings)]
    return Offload(Settings(**{name: getattr(wanted, name) for name in names}))


def open_arena(case: Case, build: Build, model: nn.Module, offload: Offload, longest: int) -> Pages:
    """Binds the caches of `model` and the experts' slots to one buffer. -> the source of KV pages
    `longest`: pages of all sequences at their longest."""
    arena, pinned = make_arena(case, *frame_of(model, case, build), offload.slot_bytes, offload.most_slots, longest)
    memory = bind_arena(model, case, build, arena.frames)
    frames = memory.view(arena.frames, -1)

    def copy(old: int, new: int) -> None:
        frames[new // arena.units].copy_(frames[old // arena.units])

    pages = ElasticPages(arena, case.cache_config.page_size, pinned, offload.make_room, copy)
    offload.open(arena, memory.view(-1).view(torch.uint8), pages.gather)
    experts = sum(layer.count for layer in offload.layers)
    print(
        f"arena: {memory.nbytes / 1e6:.1f} MB, {arena.frames} frames of {arena.frame_bytes} bytes; "
        f"{len(offload.slots)} of {experts} experts resident, {arena.free_frames} frames free"
    )
    return pages


def make_arena(
    case: Case, units: int, frame_bytes: int, slot_bytes: int, most_slots: int, longest: int
) -> tuple[Arena, int]:
    """(the arena's books, frames of experts that may not leave). `most_slots`: experts that may be resident"""
    frames_each, slots_each = extent_of(frame_bytes, slot_bytes)
    experts = -(-most_slots // slots_each) * frames_each  # frames, if all that may be resident are
    frames = case.offload_config.arena_mb * MB // frame_bytes or experts + longest + 1
    arena = Arena(frames, frame_bytes, slot_bytes, units)
    pinned = 0 if case.offload_config.mode == "elastic" else experts
    least = -(-case.max_sequence_length // case.cache_config.page_size)
    if frames - pinned - 1 < least:
        raise UserError(
            f"case {case.name}: offload_config.arena_mb: {frames} pages of {frame_bytes} bytes, of which experts keep "
            f"{pinned}, have no room for one sequence of {least} pages: raise it, or lower input_max_len"
        )
    return arena, pinned


def write_offload(offload: Offload, folder: Path) -> dict[str, Any]:
    """Plots and trace beside the report. -> what the report says of them"""
    report = offload.history.report()
    if offload.history.steps:
        from executor.offload_plots import plot

        plot(offload.history, folder / "offload.png")
        trace = json.dumps(offload.history.trace()).encode()
        write_whole(folder / "offload_trace.json", lambda file: file.write(trace))
    rate = report["hit_rate"]
    print(
        f"shadow experts: hit rate {'-' if rate is None else f'{rate:.3f}'}, {report['exposed_ms']:.1f} of "
        f"{report['shadow_ms']:.1f} ms exposed, {report['copies']} copies, {report['evictions']} evictions "
        f"({report['evictions_for_cache']} for the cache); offload.png, offload_trace.json in {folder}"
    )
    return report
