"""Chooses the settings of shadow experts that a case leaves open, by measuring synthetic experts of the case's sizes.

It runs before weights are loaded, since it chooses the number of threads, which decides where weights are placed in
memory. It reads only the checkpoint's `config.json`.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from umbra.cpu_offload.costs import Line
from umbra.cpu_offload.manager import layer_number
from umbra.cpu_offload.memory.arena import Frame, StateSizes
from umbra.cpu_offload.planner.choices import (
    ArenaSplit,
    Choices,
    ExplainedChoice,
    Threads,
    choose_slots,
    choose_streaming,
    choose_swaps,
    choose_threads,
    divisions,
    given,
)
from umbra.cpu_offload.planner.model import ExpertsShape, Planner
from umbra.cpu_offload.planner.probe import made_up, measure, read_ms
from umbra.ops.cpu.engine import cores_of, native, shadow_teams, start
from umbra.ops.cpu.shadow import BlockShape, ShadowPool
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind

CopyMs = Callable[[int], float] | None
LINK = 20e6  # bytes per millisecond assumed for copies from the host to a device that cannot be measured


@dataclass
class ShadowedLayers:
    """Takes the place of `ShadowExperts` while a model is built on meta: records the sizes of layers with shadows."""

    start_layer: int
    # count, inner, hidden, format, kind
    layers: list[tuple[int, int, int, Format, ExpertKind]] = field(default_factory=list)
    others: int = 0  # layers of experts without shadows

    def experts(self, path: str, here: slice, inner: int, hidden: int, format: Format, kind: ExpertKind) -> None:
        if layer_number(path) < self.start_layer:
            self.others += 1
        else:
            self.layers.append((here.stop - here.start, inner, hidden, format, kind))


@dataclass(frozen=True)
class Wanted:
    """A case's settings of shadow experts, the work that it gives them, and its platform."""

    mode: str
    slots: int | None  # None: the case leaves them open, as the next four
    arena_mb: float | None
    shadow_threads: int | None
    max_swaps: int | None
    stream_tokens: int | None
    interval: int
    measure_s: float
    timeout_s: int
    batch: int  # sequences of a decode step
    decode_rows: int  # most rows of a decode step, with drafted tokens
    longest: int  # tokens of a prefill step at most
    on_host: bool  # the device is this CPU
    threads_given: bool  # the case has the number of the device's threads
    instruction_set: str
    verbose: bool  # a run prints all that was measured


@dataclass(frozen=True)
class ShadowSizes:
    """The sizes of a case that the planner needs, for one rank."""

    shape: ExpertsShape
    blocks: BlockShape
    slot_bytes: int  # bytes of one expert on the device
    alignment: int  # alignment of slots in bytes
    frame: Frame
    split: ArenaSplit
    pages: int  # KV pages that sequences may hold
    least: int  # those of one sequence at its longest
    rest_bytes: int  # bytes of weights that a decode step reads, without the experts of layers with shadows
    fixed_bytes: int  # bytes of weights outside the arena
    states: StateSizes  # of the recurrent states of a sequence


def choose(
    wanted: Wanted, sizes: ShadowSizes, local: tuple[int, int], copy_ms: CopyMs = None
) -> tuple[Planner, Choices]:
    """Measures and chooses. The engine then runs with the number of threads that was chosen. `local` is this rank's
    number among those of this machine, and how many they are.

    `copy_ms(nbytes)` measures a copy to a device that is not this CPU; None: assume LINK. The time in which such a
    device computes experts is not measured here; a run measures it as a part of the rest of a step.
    """
    begun, batch, split, on_host = time.perf_counter(), wanted.batch, sizes.split, wanted.on_host
    hit = _usual_hit(wanted, split)
    blocks = made_up(sizes.blocks, split.experts)
    engine_threads = sum(team.threads for team in native.teams()) if on_host else 1
    candidates = divisions(cores_of(*local), engine_threads, wanted.threads_given or not on_host, wanted.shadow_threads)
    tried: dict[Threads, Planner] = {}
    for device, shadow in candidates:
        start(device, wanted.instruction_set, *local, shadow if on_host else 0)
        tried[device, shadow] = _measured(wanted, sizes, shadow, blocks, wanted.measure_s / len(candidates))
    if not on_host:
        link = (copy_ms or (lambda nbytes: nbytes / LINK))(sizes.slot_bytes)
        tried = {(0, n): _beside_a_device(planner, n, link, sizes.slot_bytes) for (_, n), planner in tried.items()}
    threads = choose_threads(tried, batch, hit)
    start(threads.value[0] or 1, wanted.instruction_set, *local, threads.value[1] if on_host else 0)
    planner = tried[threads.value]
    seconds = time.perf_counter() - begun
    planner = dataclasses.replace(planner, costs=dataclasses.replace(planner.costs, seconds=seconds))
    slots = _slots(wanted, planner, split)
    if wanted.mode == "fixed":
        hit = split.hit(slots.value)
    if wanted.stream_tokens is None:
        streaming = choose_streaming(planner, hit, wanted.decode_rows, wanted.longest)
    else:
        streaming = given(wanted.stream_tokens)
    return planner, Choices(threads, slots, swaps_of(wanted, planner, hit), streaming, planner.costs)


def swaps_of(wanted: Wanted, planner: Planner, hit: float) -> ExplainedChoice[int]:
    """Chooses the most copies at one decision. `hit` is the share of (token, expert) pairs whose expert is resident."""
    if wanted.mode == "resident":
        return ExplainedChoice(0, "all experts stay")
    if wanted.max_swaps is not None:
        return given(wanted.max_swaps)
    return choose_swaps(planner, wanted.batch, hit, wanted.interval)


def _usual_hit(wanted: Wanted, split: ArenaSplit) -> float:
    """The hit rate to assume before slots are chosen."""
    if wanted.mode == "resident":
        return 1.0
    if wanted.mode == "fixed" and wanted.slots is not None:
        return split.hit(wanted.slots)
    return split.usual_hit


def _slots(wanted: Wanted, planner: Planner, split: ArenaSplit) -> ExplainedChoice[int]:
    if wanted.mode == "elastic":
        return ExplainedChoice(split.experts, "as many as the KV cache leaves room for")
    if wanted.mode == "resident" or (wanted.slots is None and wanted.arena_mb is None):
        return ExplainedChoice(split.experts, f"all {split.experts}")
    if wanted.slots is not None:
        return ExplainedChoice(wanted.slots, f"{wanted.slots} of {split.experts}: given")
    return choose_slots(planner, split)


def _beside_a_device(planner: Planner, threads: int, copy: float, slot_bytes: int) -> Planner:
    """The planner for a device that is not this CPU. The shadow pool's costs are those measured, and the time of a copy
    is given; the device's own costs are unknown before a run."""
    costs = dataclasses.replace(
        planner.costs,
        base=0.0,
        device=Line(0.0, 0.0, 0.0),
        slip=0.0,
        copy=copy,
        block_bytes=slot_bytes,
        threads=(0, threads),
    )
    return dataclasses.replace(planner, costs=costs, rest=0.0, rest_from="not known before a run; nor is the device")


def _measured(wanted: Wanted, sizes: ShadowSizes, threads: int, blocks: torch.Tensor, seconds: float) -> Planner:
    """A planner with costs measured in about `seconds`, with the engine's threads and a shadow pool of `threads`
    threads. The rest of a step is assumed to take as long as reading its weights."""
    pool = ShadowPool(shadow_teams(threads), wanted.timeout_s)
    costs = measure(pool, threads, sizes.blocks, blocks, sizes.shape, wanted.batch, seconds, wanted.on_host)
    pool.stop()
    where = f"the time to read {sizes.rest_bytes / 1e6:.1f} MB; a run measures it, and it is longer"
    return Planner(sizes.shape, costs, read_ms(sizes.rest_bytes, wanted.measure_s / 12), where)
