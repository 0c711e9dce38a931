"""The planner in use, for a case with shadow experts: `--plan` prints its predictions, and a run prints them and
compares them with what it measures.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from cpu_offload.history import History
from cpu_offload.manager import Offload
from cpu_offload.memory.arena import Arena
from cpu_offload.planner.model import Shape
from executor.config.case import Case
from executor.config.env import RankEnv
from executor.config.platforms import PLATFORMS
from executor.config.units import GB
from executor.engine.shadows import make_arena
from executor.launch.platform_settings import platform_settings
from executor.platform import load_platform
from executor.platform.base import Platform
from executor.run.shadow_choices import choose, sizes_of, swaps_of
from ops.parallel.groups import Group
from umbra.errors import UserError

WARM_UP_TOKENS = 9  # tokens of each sequence in a warm-up, whose first decode step captures graphs and is not measured
Steps = list[tuple[float, float, float]]  # (tokens, hit rate, milliseconds) of each step


def steps_of(history: History, seconds: Sequence[float], shape: Shape) -> Steps:
    """The decode steps of `history` in the form that `Planner` compares; `seconds` are the whole times of the steps."""
    steps: Steps = []
    for step, time in zip(history.steps, seconds, strict=True):
        hits, misses = int(step.hits.sum()), int(step.misses.sum())
        pairs = hits + misses
        steps.append((pairs / shape.layers / shape.top_k, hits / pairs if pairs else 1.0, 1e3 * time))
    return steps


class PlannedRun:
    """Chooses before weights are loaded, prints what is expected of the run, and compares it with what was measured."""

    def __init__(self, case: Case, ranks: RankEnv, world: Group, platform: Platform):
        self.case = case
        self.planner, choices = choose(case, sizes_of(case), ranks, platform.copy_ms)
        # The number of slots decides which sequences are admitted, so all ranks take rank 0's; the rest may differ.
        own = torch.tensor([[choices.slots.value]], device=platform.device)
        slots = int(world.gather_rows(own, (1,) * world.size)[0, 0])
        self.choices = dataclasses.replace(choices, slots=dataclasses.replace(choices.slots, value=slots))

    def begin(self, offload: Offload, warm_up: Sequence[float]) -> None:
        """To be called after the warm-up. `warm_up` are the seconds of each of its decode steps. They give the rest of
        a step, which decides how many copies fit beside it."""
        steps = steps_of(offload.history, warm_up, self.planner.shape)[1:]
        if steps:
            rest = self.planner.rest_of(steps)
            where = f"measured in {len(steps)} steps of the warm-up"
            self.planner = dataclasses.replace(self.planner, rest=rest, rest_from=where)
            swaps = swaps_of(self.case, self.planner, self.planner.compare(steps)["hit_rate"])
            self.choices = dataclasses.replace(self.choices, max_swaps=swaps)
        offload.value_copies(self.planner.swap_cost, self.choices.max_swaps.value)
        offload.forget()
        print("\n".join(self.planner.table(self.case.data_config.batch_size) + self.choices.table()))

    def prompt_step_s(self, tokens: float, hit: float) -> float:
        """Seconds of the layers with shadows in a step with so many prompt tokens, of whose experts the share `hit` is
        resident."""
        streamed = 0 < self.choices.stream_tokens.value <= tokens
        layer_ms = self.planner.stream_ms if streamed else self.planner.layer_ms
        return self.planner.shape.layers * layer_ms(tokens, hit) / 1e3

    def end(self, offload: Offload, seconds: Sequence[float]) -> dict[str, Any] | None:
        """To be called after the run. `seconds` are the seconds of each of its decode steps. -> the report's
        `offload.plan`; None if there were no decode steps."""
        prefill = None
        if long := offload.history.long:
            prefill = self.planner.compare_long(long)
            print(
                f"planner: a layer of a prefill: {prefill['streamed_ms']:.3f} ms predicted if streamed, "
                f"{prefill['computed_ms']:.3f} if computed by both, {prefill['measured_ms']:.3f} measured "
                f"(medians of {prefill['layers']} layers with {prefill['tokens']:.0f} tokens, "
                f"{prefill['streamed_layers']} streamed)"
            )
        steps = steps_of(offload.history, seconds, self.planner.shape)
        if not steps:
            return None
        found = self.planner.compare(steps)
        print(
            f"planner: {found['predicted_ms']:.3f} ms per token predicted at hit rate {found['hit_rate']:.3f}, "
            f"{found['measured_ms']:.3f} measured (medians of {len(steps)} steps): {found['ratio']:.2f} of it"
        )
        chosen = {key: choice["value"] for key, choice in dataclasses.asdict(self.choices).items()}
        costs = dataclasses.asdict(self.planner.costs)
        return found | {"rest_ms": self.planner.rest, "prefill": prefill, "choices": chosen, "costs": costs}


def show_offload_plan(case: Case) -> None:
    """Prints how memory would be divided and how long steps would take. It counts memory and measures made-up experts,
    but loads no weights."""
    sizes, platform = sizes_of(case), PLATFORMS[case.platform]
    ranks = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=case.world_size, error_file="")
    if platform.is_host:  # measured with the platform's own engine
        load_platform(case.platform)(platform_settings(case), ranks)
    planner, choices = choose(case, sizes, ranks)
    longest, experts, most_slots = sizes.sketch.pages, sizes.split.experts, choices.slots.value
    arena, pinned = make_arena(case, *sizes.frame, sizes.slot_bytes, most_slots, longest, sizes.alignment)
    print(f"case {case.name}: {case.platform}, offload_config.mode: {case.offload_config.mode}")
    print("\n".join(memory_split(case, arena, pinned, longest, most_slots, experts)))
    beside = sizes.fixed_bytes + arena.frames * arena.frame_bytes
    print(f"beside the arena: {sizes.fixed_bytes / 1e6:.1f} MB of other weights, {beside / 1e9:.2f} GB together")
    pinned_gb = f", and {experts * sizes.slot_bytes / 1e9:.2f} GB pinned, as the device has them"
    print(
        f"on the host: {experts * sizes.blocks.block_bytes / 1e9:.2f} GB of shadows"
        + ("" if platform.is_host else pinned_gb)
    )
    if platform.plans_memory and beside > case.ascend_config.memory_gb * GB:
        raise UserError(
            f"case {case.name}: {beside / GB:.2f} GB of weights and arena are more than ascend_config.memory_gb: "
            f"{case.ascend_config.memory_gb}: lower offload_config.arena_mb, or raise world_size"
        )
    print("\n".join(planner.table(case.data_config.batch_size) + choices.table()))
    print("Hit rates depend on the text; even traffic hits as often as its share of experts is resident.")


def memory_split(case: Case, arena: Arena, pinned: int, longest: int, most_slots: int, experts: int) -> list[str]:
    """The lines that `--plan` prints about the arena. `pinned` is the number of frames of experts that may not be
    evicted, `longest` the number of pages of all sequences at their longest, `experts` the number of experts in all
    layers with shadows."""
    frames, each = arena.frames - 1, arena.extent_frames  # without the frame of the padding page
    pages = frames - pinned
    lines = [
        f"arena: {arena.frames * arena.frame_bytes / 1e6:.1f} MB, {arena.frames} frames of {arena.frame_bytes} bytes, "
        f"each a page of {case.cache_config.page_size} tokens or part of {arena.extent_slots} slots in {each} frames",
        f"experts: {experts} with shadows, {arena.slot_bytes} bytes each; {most_slots} may be resident at once",
        f"KV pages: {longest} for {case.data_config.batch_size} sequence(s) at their longest, {pages} can be had"
        + ("" if pages >= longest else ": not all sequences run at once"),
    ]
    for name, held in (
        ("no sequence", 0),
        ("half as long", min(longest // 2, pages)),
        ("the longest", min(longest, pages)),
    ):
        slots = min(most_slots, (arena.frames - 1 - held) // each * arena.extent_slots)
        lines.append(f"  {name:<14} {held:>6} pages, {slots:>6} slots: {slots / experts:4.0%} of the experts fit")
    return lines
