"""Measures made-up experts of a case's sizes and chooses what the case leaves open, before weights are loaded: as the
threads are chosen too, and weights are placed by them. Reads only the checkpoint's `config.json`."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cpu_offload.cost.choices import (
    NONE,
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
)  # fmt: skip
from cpu_offload.cost.model import Line, Planner, Shape
from cpu_offload.cost.probe import made_up, measure, read_ms
from cpu_offload.device import CpuDevice
from cpu_offload.manager import layer_number, the_one
from cpu_offload.memory.arena import extent_of
from executor.config.case import Case
from executor.config.env import RankEnv
from executor.engine.building import frame_of
from executor.engine.shadows import expert_frames, frames_of
from executor.planning.memory import EXPERTS, ROWS, Sketch, sketch_of, weights_of
from ops.ascend.vector_core.blocks import PLACE, BlockLayout
from ops.cpu.engine import cores_of, native, shadow_teams, start
from ops.cpu.shadow import ExpertBlocks, ShadowPool
from ops.format import Format

CopyMs = Callable[[int], float] | None
LINK = 20e6  # bytes in a millisecond that a host sends to a device, where there is none to ask


@dataclass
class Survey:
    """Stands in for whoever keeps shadows: notes which layers have some, keeps none."""

    start_layer: int
    layers: list[tuple[int, int, int, Format]] = field(default_factory=list)  # count, inner, hidden, format
    others: int = 0  # layers of experts without

    def experts(self, path: str, here: slice, inner: int, hidden: int, format: Format) -> None:
        if layer_number(path) < self.start_layer:
            self.others += 1
        else:
            self.layers.append((here.stop - here.start, inner, hidden, format))


@dataclass(frozen=True)
class Surveyed:
    """A case's sizes."""

    sketch: Sketch
    shape: Shape
    blocks: ExpertBlocks
    slot_bytes: int  # on the device
    alignment: int  # of slots
    frame: tuple[int, int]  # units, bytes
    split: Split
    rest_bytes: int  # of weights that a decode step reads beside those of layers with shadows
    fixed_bytes: int  # of weights outside the arena


def survey_of(case: Case) -> Surveyed:
    survey = Survey(case.offload_config.start_layer)
    sketch = sketch_of(case, survey)
    count, inner, hidden, format = the_one(set(survey.layers), survey.start_layer)
    blocks = ExpertBlocks(inner, hidden, format)
    config = sketch.config  # `count` of a layer's experts are on this rank, and so are on average as many of a token's
    here = max(1, round(config.num_experts_per_tok * count / config.num_experts))
    shape = Shape(len(survey.layers), count, here)
    frame, batch = frame_of(sketch.model, case, sketch.build), case.data_config.batch_size
    experts, size, alignment = shape.layers * count, blocks.block_bytes, CpuDevice.alignment
    if case.platform == "ascend":
        size, alignment = BlockLayout.of(inner, hidden, format, sketch.build.dtype).block_bytes, PLACE
    split = Split(
        frames_of(case, frame[1], expert_frames(frame[1], size, experts), sketch.pages) - 1,
        *extent_of(frame[1], size), sketch.pages // batch, batch, experts,
    )  # fmt: skip
    weights = weights_of(sketch.model)
    unshadowed = sum(part.nbytes for part in weights if part.name in EXPERTS) * survey.others
    unshadowed //= survey.others + shape.layers
    rest = sum(part.nbytes for part in weights if part.name not in (*ROWS, *EXPERTS))
    rest += round(unshadowed * shape.used(batch) / count)
    fixed = sum(part.nbytes for part in weights if part.name not in EXPERTS) + unshadowed
    return Surveyed(sketch, shape, blocks, size, alignment, frame, split, rest, fixed)


def choose(case: Case, sizes: Surveyed, ranks: RankEnv, copy_ms: CopyMs = None) -> tuple[Planner, Choices]:
    """Afterwards the engine has the threads that were chosen. `copy_ms`: of so many bytes to the device, where that is
    not this CPU; its own products are then part of what a run measures as the rest of a step."""
    begun, wanted, batch, split = time.perf_counter(), case.offload_config, case.data_config.batch_size, sizes.split
    hit = _usual_hit(case, split)
    local, here = (ranks.local_rank, ranks.local_world_size), case.platform == "cpu"
    stores = made_up(sizes.blocks, sizes.shape.experts, sizes.shape.layers)
    engine_threads = sum(team.threads for team in native.teams()) if here else 1
    candidates = divisions(cores_of(*local), engine_threads, case.threads > 0 or not here, wanted.shadow_threads)
    tried: dict[Threads, Planner] = {}
    for device, shadow in candidates:
        start(device, case.instruction_set, *local, shadow if here else 0)
        tried[device, shadow] = _measured(case, sizes, shadow, stores, len(candidates))
    if not here:
        link = (copy_ms or (lambda nbytes: nbytes / LINK))(sizes.slot_bytes)
        tried = {(0, n): _beside_a_device(planner, n, link, sizes.slot_bytes) for (_, n), planner in tried.items()}
    threads = choose_threads(tried, batch, hit)
    start(threads.value[0] or 1, case.instruction_set, *local, threads.value[1] if here else 0)
    planner = tried[threads.value]
    seconds = time.perf_counter() - begun
    planner = dataclasses.replace(planner, costs=dataclasses.replace(planner.costs, seconds=seconds))
    slots = _slots(case, planner, split)
    if wanted.mode == "fixed":
        hit = max(slots.value, 0) / split.experts
    data = case.data_config
    longest = min(batch * data.input_max_len, data.chunked_prefill_size or 1 << 62)
    streaming = given(wanted.stream_tokens)
    if not wanted.stream_tokens:
        streaming = choose_streaming(planner, hit, batch, longest)
    return planner, Choices(threads, slots, swaps_of(case, planner, hit), streaming)


def swaps_of(case: Case, planner: Planner, hit: float) -> Choice[int]:
    wanted = case.offload_config
    if wanted.mode == "resident":
        return Choice(NONE, "all experts stay")
    if wanted.max_swaps:
        return given(wanted.max_swaps)
    return choose_swaps(planner, case.data_config.batch_size, hit, wanted.interval)


def _usual_hit(case: Case, split: Split) -> float:
    wanted = case.offload_config
    if wanted.mode == "resident":
        return 1.0
    if wanted.mode == "fixed" and wanted.slots:
        return max(wanted.slots, 0) / split.experts
    return split.usual_hit


def _slots(case: Case, planner: Planner, split: Split) -> Choice[int]:
    wanted = case.offload_config
    if wanted.mode == "elastic":
        return Choice(split.experts, "as many as the KV cache leaves room for")
    if wanted.mode == "resident" or not (wanted.slots or wanted.arena_mb):
        return Choice(split.experts, f"all {split.experts}")
    if wanted.slots:
        return Choice(wanted.slots, f"{max(wanted.slots, 0)} of {split.experts}: given")
    return choose_slots(planner, split)


def _beside_a_device(planner: Planner, threads: int, copy: float, slot_bytes: int) -> Planner:
    """With the shadow pool's costs as measured; the device works beside it, how long is known once it ran."""
    costs = dataclasses.replace(
        planner.costs, base=0.0, device=Line(0.0, 0.0, 0.0), slip=0.0, copy=copy, block_bytes=slot_bytes,
        threads=(0, threads),
    )  # fmt: skip
    return dataclasses.replace(planner, costs=costs, rest=0.0, rest_from="not known before a run; nor is the device")


def _measured(case: Case, sizes: Surveyed, threads: int, stores: list[torch.Tensor], parts: int) -> Planner:
    """With the engine's threads and so many of a shadow pool; the rest of a step as long as reading it takes."""
    pool = ShadowPool(shadow_teams(threads), case.offload_config.timeout_s)
    costs = measure(pool, threads, sizes.blocks, stores, sizes.shape, case.data_config.batch_size, parts)
    pool.stop()
    where = f"the time to read {sizes.rest_bytes / 1e6:.1f} MB; a run measures it, and it is longer"
    return Planner(sizes.shape, costs, read_ms(sizes.rest_bytes), where)
