"""Chooses the settings of shadow experts that a case leaves open, by measuring made-up experts of the case's sizes.

It runs before weights are loaded, since it chooses the number of threads, which decides where weights are placed in
memory. It reads only the checkpoint's `config.json`.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cpu_offload.manager import layer_number, the_one
from cpu_offload.memory.arena import extent_of
from cpu_offload.planner.choices import (  # fmt: skip
    Choice,
    Choices,
    Split,
    Threads,
    choose_slots,
    choose_streaming,
    choose_swaps,
    choose_threads,
    divisions,
    given,
)
from cpu_offload.planner.model import Line, Planner, Shape
from cpu_offload.planner.probe import made_up, measure, read_ms
from executor.config.case import Case
from executor.config.env import RankEnv
from executor.config.platforms import PLATFORMS
from executor.engine.building import frame_of
from executor.engine.shadows import expert_frames, frames_of
from executor.run.ascend_memory_plan import EXPERTS, ROWS, Sketch, sketch_of, weights_of
from models.registry import load
from ops.cpu.engine import cores_of, native, shadow_teams, start
from ops.cpu.shadow import ExpertBlocks, ShadowPool
from ops.format import Format

CopyMs = Callable[[int], float] | None
LINK = 20e6  # bytes per millisecond assumed for copies from the host to a device that cannot be measured


@dataclass
class ShadowedLayers:
    """Takes the place of `Offload` while a model is built on meta: records the sizes of layers with shadows."""

    start_layer: int
    layers: list[tuple[int, int, int, Format]] = field(default_factory=list)  # count, inner, hidden, format
    others: int = 0  # layers of experts without shadows

    def experts(self, path: str, here: slice, inner: int, hidden: int, format: Format) -> None:
        if layer_number(path) < self.start_layer:
            self.others += 1
        else:
            self.layers.append((here.stop - here.start, inner, hidden, format))


@dataclass(frozen=True)
class Sizes:
    """The sizes of a case that the planner needs, for one rank."""

    sketch: Sketch
    shape: Shape
    blocks: ExpertBlocks
    slot_bytes: int  # bytes of one expert on the device
    alignment: int  # alignment of slots in bytes
    frame: tuple[int, int]  # units and bytes of a frame
    split: Split
    rest_bytes: int  # bytes of weights that a decode step reads, without the experts of layers with shadows
    fixed_bytes: int  # bytes of weights outside the arena


def sizes_of(case: Case) -> Sizes:
    found = ShadowedLayers(case.offload_config.start_layer)
    sketch = sketch_of(case, found)
    count, inner, hidden, format = the_one(set(found.layers), found.start_layer)
    blocks = ExpertBlocks(inner, hidden, format)
    config = sketch.config
    # This rank has `count` of a layer's experts, and so on average the same share of the experts of a token.
    top_k = max(1, round(config.experts_per_token * count / config.expert_count))
    shape = Shape(len(found.layers), count, top_k)
    frame, batch = frame_of(sketch.model, case, sketch.build), case.data_config.batch_size
    slot_bytes, alignment = load(PLATFORMS[case.platform].expert_slot)(inner, hidden, format, sketch.build.dtype)
    experts = shape.layers * count
    split = Split(
        frames_of(case, frame[1], expert_frames(frame[1], slot_bytes, experts), sketch.pages) - 1,
        *extent_of(frame[1], slot_bytes), sketch.pages // batch, batch, experts,
    )  # fmt: skip
    weights = weights_of(sketch.model)
    unshadowed = sum(part.nbytes for part in weights if part.name in EXPERTS) * found.others
    unshadowed //= found.others + shape.layers
    rest = sum(part.nbytes for part in weights if part.name not in (*ROWS, *EXPERTS))
    rest += round(unshadowed * shape.used(batch) / count)
    fixed = sum(part.nbytes for part in weights if part.name not in EXPERTS) + unshadowed
    return Sizes(sketch, shape, blocks, slot_bytes, alignment, frame, split, rest, fixed)


def choose(case: Case, sizes: Sizes, ranks: RankEnv, copy_ms: CopyMs = None) -> tuple[Planner, Choices]:
    """Measures and chooses. The engine then runs with the number of threads that was chosen.

    `copy_ms(nbytes)` measures a copy to a device that is not this CPU; None: assume LINK. The time in which such a
    device computes experts is not measured here; a run measures it as a part of the rest of a step.
    """
    begun, wanted, batch, split = time.perf_counter(), case.offload_config, case.data_config.batch_size, sizes.split
    hit = _usual_hit(case, split)
    local, on_host = (ranks.local_rank, ranks.local_world_size), PLATFORMS[case.platform].is_host
    made = made_up(sizes.blocks, split.experts)
    engine_threads = sum(team.threads for team in native.teams()) if on_host else 1
    candidates = divisions(
        cores_of(*local), engine_threads, case.threads is not None or not on_host, wanted.shadow_threads
    )
    tried: dict[Threads, Planner] = {}
    for device, shadow in candidates:
        start(device, case.instruction_set, *local, shadow if on_host else 0)
        tried[device, shadow] = _measured(case, sizes, shadow, made, wanted.measure_s / len(candidates))
    if not on_host:
        link = (copy_ms or (lambda nbytes: nbytes / LINK))(sizes.slot_bytes)
        tried = {(0, n): _beside_a_device(planner, n, link, sizes.slot_bytes) for (_, n), planner in tried.items()}
    threads = choose_threads(tried, batch, hit)
    start(threads.value[0] or 1, case.instruction_set, *local, threads.value[1] if on_host else 0)
    planner = tried[threads.value]
    seconds = time.perf_counter() - begun
    planner = dataclasses.replace(planner, costs=dataclasses.replace(planner.costs, seconds=seconds))
    slots = _slots(case, planner, split)
    if wanted.mode == "fixed":
        hit = slots.value / split.experts
    data = case.data_config
    longest = min(batch * data.input_max_len, data.chunked_prefill_size or 1 << 62)
    if wanted.stream_tokens is None:
        streaming = choose_streaming(planner, hit, batch, longest)
    else:
        streaming = given(wanted.stream_tokens)
    return planner, Choices(threads, slots, swaps_of(case, planner, hit), streaming)


def swaps_of(case: Case, planner: Planner, hit: float) -> Choice[int]:
    """Chooses the most copies at one decision. `hit` is the share of (token, expert) pairs whose expert is resident."""
    wanted = case.offload_config
    if wanted.mode == "resident":
        return Choice(0, "all experts stay")
    if wanted.max_swaps is not None:
        return given(wanted.max_swaps)
    return choose_swaps(planner, case.data_config.batch_size, hit, wanted.interval)


def _usual_hit(case: Case, split: Split) -> float:
    """The hit rate to assume before slots are chosen, with all experts used equally often."""
    wanted = case.offload_config
    if wanted.mode == "resident":
        return 1.0
    if wanted.mode == "fixed" and wanted.slots is not None:
        return wanted.slots / split.experts
    return split.usual_hit


def _slots(case: Case, planner: Planner, split: Split) -> Choice[int]:
    wanted = case.offload_config
    if wanted.mode == "elastic":
        return Choice(split.experts, "as many as the KV cache leaves room for")
    if wanted.mode == "resident" or (wanted.slots is None and wanted.arena_mb is None):
        return Choice(split.experts, f"all {split.experts}")
    if wanted.slots is not None:
        return Choice(wanted.slots, f"{wanted.slots} of {split.experts}: given")
    return choose_slots(planner, split)


def _beside_a_device(planner: Planner, threads: int, copy: float, slot_bytes: int) -> Planner:
    """The planner for a device that is not this CPU. The shadow pool's costs are those measured, and the time of a copy
    is given; the device's own costs are unknown before a run."""
    costs = dataclasses.replace(
        planner.costs, base=0.0, device=Line(0.0, 0.0, 0.0), slip=0.0, copy=copy, block_bytes=slot_bytes,
        threads=(0, threads),
    )  # fmt: skip
    return dataclasses.replace(planner, costs=costs, rest=0.0, rest_from="not known before a run; nor is the device")


def _measured(case: Case, sizes: Sizes, threads: int, made: torch.Tensor, seconds: float) -> Planner:
    """A planner with costs measured in about `seconds`, with the engine's threads and a shadow pool of `threads`
    threads. The rest of a step is assumed to take as long as reading its weights."""
    pool = ShadowPool(shadow_teams(threads), case.offload_config.timeout_s)
    costs = measure(pool, threads, sizes.blocks, made, sizes.shape, case.data_config.batch_size, seconds)
    pool.stop()
    where = f"the time to read {sizes.rest_bytes / 1e6:.1f} MB; a run measures it, and it is longer"
    return Planner(sizes.shape, costs, read_ms(sizes.rest_bytes, case.offload_config.measure_s / 12), where)
