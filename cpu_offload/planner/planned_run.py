"""The planner in a run: what is expected is printed, and compared with what is measured."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from umbra.cpu_offload.history import History
from umbra.cpu_offload.manager import ShadowExperts
from umbra.cpu_offload.planner.choosing import CopyMs, ShadowSizes, Wanted, choose, swaps_of
from umbra.cpu_offload.planner.model import ExpertsShape
from umbra.ops.parallel.groups import Group

WARM_UP_TOKENS = 9  # tokens of each sequence in a warm-up, whose first decode step captures graphs and is not measured
MeasuredSteps = list[tuple[float, float, float]]  # (tokens, hit rate, milliseconds) of each step


def steps_of(history: History, seconds: Sequence[float], shape: ExpertsShape) -> MeasuredSteps:
    """The decode steps of `history` in the form that `Planner` compares; `seconds` are the whole times of the steps."""
    steps: MeasuredSteps = []
    for step, time in zip(history.steps, seconds, strict=True):
        hits, misses = int(step.hits.sum()), int(step.misses.sum())
        pairs = hits + misses
        steps.append((pairs / shape.layers / shape.top_k, hits / pairs if pairs else 1.0, 1e3 * time))
    return steps


class PlannedRun:
    """Chooses before weights are loaded, prints what is expected of the run, and compares it with what was measured."""

    def __init__(
        self,
        wanted: Wanted,
        sizes: ShadowSizes,
        local: tuple[int, int],
        world: Group,
        device: torch.device,
        copy_ms: CopyMs,
    ):
        """`local` and `copy_ms` are those of `choose`; `device` is where `world` exchanges tensors."""
        self.wanted = wanted
        self.planner, choices = choose(wanted, sizes, local, copy_ms)
        # The number of slots decides which sequences are admitted, so all ranks take rank 0's; the rest may differ.
        own = torch.tensor([[choices.slots.value]], device=device)
        slots = int(world.gather_rows(own, (1,) * world.size)[0, 0])
        self.choices = dataclasses.replace(choices, slots=dataclasses.replace(choices.slots, value=slots))

    def begin(self, shadows: ShadowExperts, warm_up: Sequence[float]) -> None:
        """To be called after the warm-up. `warm_up` are the seconds of each of its decode steps. They give the rest of
        a step, which decides how many copies fit into it."""
        steps = steps_of(shadows.history, warm_up, self.planner.shape)[1:]
        if steps:
            rest = self.planner.rest_of(steps)
            where = f"measured in {len(steps)} steps of the warm-up"
            self.planner = dataclasses.replace(self.planner, rest=rest, rest_from=where)
            swaps = swaps_of(self.wanted, self.planner, self.planner.compare(steps)["hit_rate"])
            self.choices = dataclasses.replace(self.choices, max_swaps=swaps)
        shadows.value_copies(self.planner.swap_cost, self.choices.max_swaps.value)
        shadows.forget()
        if self.wanted.verbose:
            lines = self.planner.table(self.wanted.batch) + self.choices.table()
        else:
            lines = self.choices.summary(self.planner, self.wanted.batch)
        print("\n".join(lines))

    def prompt_step_s(self, tokens: float, hit: float) -> float:
        """Seconds of the layers with shadows in a step with so many prompt tokens, of whose experts the share `hit` is
        resident."""
        streamed = 0 < self.choices.stream_tokens.value <= tokens
        layer_ms = self.planner.stream_ms if streamed else self.planner.layer_ms
        return self.planner.shape.layers * layer_ms(tokens, hit) / 1e3

    def end(self, shadows: ShadowExperts, seconds: Sequence[float]) -> dict[str, Any] | None:
        """To be called after the run. `seconds` are the seconds of each of its decode steps. -> the report's
        `offload.plan`; None if there were no decode steps."""
        prefill = None
        if long := shadows.history.long:
            prefill = self.planner.compare_long(long)
            print(
                f"planner: a layer of a prefill: {prefill['streamed_ms']:.3f} ms predicted if streamed, "
                f"{prefill['computed_ms']:.3f} if computed by both, {prefill['measured_ms']:.3f} measured "
                f"(medians of {prefill['layers']} layers with {prefill['tokens']:.0f} tokens, "
                f"{prefill['streamed_layers']} streamed)"
            )
        steps = steps_of(shadows.history, seconds, self.planner.shape)
        if not steps:
            return None
        comparison = self.planner.compare(steps)
        print(
            f"planner: {comparison['predicted_ms']:.3f} ms per token predicted "
            f"at hit rate {comparison['hit_rate']:.3f}, "
            f"{comparison['measured_ms']:.3f} measured (medians of {len(steps)} steps): {comparison['ratio']:.2f} of it"
        )
        chosen = dataclasses.asdict(self.choices)
        costs = chosen.pop("costs")
        chosen = {key: choice["value"] for key, choice in chosen.items()}
        return comparison | {"rest_ms": self.planner.rest, "prefill": prefill, "choices": chosen, "costs": costs}
