"""The planner of a case with shadow experts: `--plan` from made-up blocks, and around a run from its own."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cpu_offload.arena import Arena
from cpu_offload.device import CpuDevice
from cpu_offload.history import History
from cpu_offload.offload import Offload, layer_number, the_one
from cpu_offload.planner import Planner, Shape
from cpu_offload.probe import made_up, measure, read_ms
from executor.building import frame_of
from executor.config import Case
from executor.env import RankEnv
from executor.offloading import make_arena
from executor.plan import EXPERTS, ROWS, Sketch, sketch_of, weights_of
from executor.platform import load_platform
from ops.cpu.engine import shadow_teams
from ops.cpu.shadow import ExpertBlocks, ShadowPool
from ops.interface import Format

WARM_UP_TOKENS = 9  # of a warm-up that the rest of a step is measured in; the first step captures
Steps = list[tuple[float, float, float]]  # tokens, hit rate, milliseconds


def steps_of(history: History, seconds: Sequence[float], shape: Shape) -> Steps:
    """Decode steps as the planner sees them; `seconds` of each, all of it."""
    steps: Steps = []
    for step, time in zip(history.steps, seconds, strict=True):
        hits, misses = int(step.hits.sum()), int(step.misses.sum())
        pairs = hits + misses
        steps.append((pairs / shape.layers / shape.top_k, hits / pairs if pairs else 1.0, 1e3 * time))
    return steps


def shape_of(layers: int, here: int, config: Any) -> Shape:
    """`here` of a layer's experts are on this rank, and so are on average as many of each token's."""
    return Shape(layers, here, max(1, round(config.num_experts_per_tok * here / config.num_experts)))


class PlannedRun:
    """Measures once weights are loaded, tells what is to be expected, and afterwards how it was."""

    def __init__(self, case: Case, offload: Offload, config: Any):
        self.case, self.offload = case, offload
        layers = offload.layers
        shape = shape_of(len(layers), layers[0].count, config)
        blocks = layers[0].blocks
        stores = made_up(blocks, shape.experts, shape.layers)
        threads, most = offload.settings.shadow_threads, case.data_config.batch_size
        costs = measure(offload.pool, threads, blocks, stores, shape, most)
        self.planner = Planner(shape, costs)
        offload.value_copies(self.planner.swap_cost)

    def begin(self, warm_up: Sequence[float]) -> None:
        """`warm_up`: seconds of its decode steps."""
        steps = steps_of(self.offload.history, warm_up, self.planner.shape)[1:]
        if steps:
            rest = self.planner.rest_of(steps)
            where = f"measured in {len(steps)} steps of the warm-up"
            self.planner = dataclasses.replace(self.planner, rest=rest, rest_from=where)
        self.offload.forget()
        print("\n".join(self.planner.table(self.case.data_config.batch_size)))

    def end(self, seconds: Sequence[float]) -> dict[str, Any] | None:
        """For the report; None where no step was decoded."""
        steps = steps_of(self.offload.history, seconds, self.planner.shape)
        if not steps:
            return None
        found = self.planner.compare(steps)
        print(
            f"planner: {found['predicted_ms']:.3f} ms per token predicted at hit rate {found['hit_rate']:.3f}, "
            f"{found['measured_ms']:.3f} measured (medians of {len(steps)} steps): {found['ratio']:.2f} of it"
        )
        return found | {"rest_ms": self.planner.rest, "costs": dataclasses.asdict(self.planner.costs)}


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


def show_offload_plan(case: Case) -> None:
    """Memory counted, times of made-up experts measured; nothing is loaded."""
    survey = Survey(case.offload_config.start_layer)
    sketch = sketch_of(case, survey)
    count, inner, hidden, format = the_one(set(survey.layers), survey.start_layer)
    blocks, shape = ExpertBlocks(inner, hidden, format), shape_of(len(survey.layers), count, sketch.config)
    experts = shape.layers * count
    most_slots = case.offload_config.slots if case.offload_config.mode == "fixed" else experts
    frame = frame_of(sketch.model, case, sketch.build)
    arena, pinned = make_arena(case, *frame, blocks.block_bytes, most_slots, sketch.pages, CpuDevice.alignment)
    ranks = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=case.world_size, error_file="")
    load_platform(case.platform)(case, ranks)
    planner = _measured(case, sketch, survey, blocks, shape)
    print(f"case {case.name}: {case.platform}, offload_config.mode: {case.offload_config.mode}")
    print("\n".join(memory_split(case, arena, pinned, sketch.pages, most_slots, experts)))
    print("\n".join(planner.table(case.data_config.batch_size)))
    print("Hit rates depend on the text; even traffic hits as often as its share of experts is resident.")


def memory_split(case: Case, arena: Arena, pinned: int, longest: int, most_slots: int, experts: int) -> list[str]:
    """For people. `longest`: pages of all sequences at their longest."""
    frames, each = arena.frames - 1, arena.extent_frames  # one is the padding page's
    pages = frames - pinned
    lines = [
        f"arena: {arena.frames * arena.frame_bytes / 1e6:.1f} MB, {arena.frames} frames of {arena.frame_bytes} bytes, "
        f"each a page of {case.cache_config.page_size} tokens or part of {arena.extent_slots} slots in {each} frames",
        f"experts: {experts} with shadows, {arena.slot_bytes} bytes each; {most_slots} may be resident at once",
        f"KV pages: {longest} for {case.data_config.batch_size} sequence(s) at their longest, {pages} can be had"
        + ("" if pages >= longest else ": not all sequences run at once"),
    ]
    for name, held in (("no sequence", 0), ("half as long", longest // 2), ("the longest", min(longest, pages))):
        slots = min(most_slots, (arena.frames - 1 - held) // each * arena.extent_slots)
        lines.append(f"  {name:<14} {held:>6} pages, {slots:>6} slots: {slots / experts:4.0%} of the experts fit")
    return lines


def _measured(case: Case, sketch: Sketch, survey: Survey, blocks: ExpertBlocks, shape: Shape) -> Planner:
    """Costs of made-up blocks; the rest of a step as long as reading it takes."""
    threads = case.offload_config.shadow_threads
    pool = ShadowPool(shadow_teams(threads), case.offload_config.timeout_s)
    stores = made_up(blocks, shape.experts, shape.layers)
    costs = measure(pool, threads, blocks, stores, shape, case.data_config.batch_size)
    pool.stop()
    weights = weights_of(sketch.model)
    experts = sum(part.nbytes for part in weights if part.name in EXPERTS) / (survey.others + shape.layers)
    share = shape.used(case.data_config.batch_size) / shape.experts
    nbytes = sum(part.nbytes for part in weights if part.name not in (*ROWS, *EXPERTS))
    nbytes += round(survey.others * experts * share)
    where = f"the time to read {nbytes / 1e6:.1f} MB; a run measures it, and it is longer"
    return Planner(shape, costs, read_ms(nbytes), where)
