"""Measures the bookkeeping of shadow experts between two decode steps, in microseconds.

    .venv/bin/umbra bench offload_overhead [--steps N] [--json FILE]

No model runs: synthetic Zipf routing is added to the counts as a step's ops would do, and the CPU's caches are emptied
before each step. A quarter of the experts is resident, each of a few KB. Medians of CPU time, without the first tenth.
Columns, keys of `rows` in the JSON file:
  shape    layers x experts, of which `top_k` a token
  traffic  sequences at once; swap_cost of the policy
  begin, started, end       of ShadowExperts
  observe, swaps            of Residency, parts of end
  hit_rate, copies          of the whole run; a change that only makes it faster does not change them
"""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from umbra.cpu_offload.manager import ShadowExperts, ShadowSettings
from umbra.cpu_offload.memory.arena import Arena
from umbra.executor.platform.cpu.shadow_device import CpuDevice
from umbra.models.registry import shapes
from umbra.ops.cpu.engine import shadow_teams
from umbra.ops.cpu.shadow import ShadowPool
from umbra.ops.formats import FORMATS
from umbra.ops.interface import SILU_EXPERTS
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows
from umbra.tools.benchmarks.routing_traces import made_up

DEMO = (5, 32, 4)  # layers, experts and experts of a token
PUBLISHED = "Qwen3-30B-A3B", "MiniMax-M2"
OTHERS = np.ones(64 << 20, np.uint8)  # read between steps, to empty the CPU's caches
MOST_COPIES = 4  # at one decision
PARTS = ("begin", "started", "end", "observe", "swaps")
COLUMNS = (
    ("shape", "shape", 10, ""),
    ("sequences", "sequences", 11, ""),
    ("swap_cost", "swap cost", 11, ""),
    *((part, part, 9, ".0f") for part in PARTS),
    ("hit_rate", "hit rate", 10, ".4f"),
    ("copies", "copies", 8, ""),
)


def shadow_experts(layers: int, experts: int, swap_cost: float) -> ShadowExperts:
    slots = layers * experts // 4
    device, pool = CpuDevice(decode_tokens=1), ShadowPool(shadow_teams(1), 30)
    shadows = ShadowExperts(ShadowSettings("fixed", 0, slots, 1, MOST_COPIES), device, pool)
    for layer in range(layers):
        shadows.experts(f"model.{layer}.experts", slice(0, experts), 16, 16, FORMATS["float32"], SILU_EXPERTS)
    arena = Arena(slots * shadows.slot_bytes // 1024 + 16, 1024, shadows.slot_bytes, 2 * layers)
    shadows.open(arena, torch.zeros(arena.frames * arena.frame_bytes, dtype=torch.uint8), lambda: None)
    shadows.value_copies(swap_cost, MOST_COPIES)
    return shadows


def timed(times: dict[str, list[float]], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        start = time.thread_time()
        result = call(*args)
        times[name].append(time.thread_time() - start)
        return result

    return run


def measure(layers: int, experts: int, top_k: int, sequences: int, swap_cost: float, steps: int) -> Row:
    shadows, times = shadow_experts(layers, experts, swap_cost), defaultdict[str, list[float]](list)
    policy, device = shadows.residency, shadows.device
    if not isinstance(device, CpuDevice):
        raise TypeError("not the CPU")
    policy.observe = timed(times, "observe", policy.observe)  # type: ignore[method-assign]
    policy.swaps = timed(times, "swaps", policy.swaps)  # type: ignore[method-assign]
    begin, started, end = (timed(times, name, getattr(shadows, name)) for name in PARTS[:3])
    trace = made_up("Zipf", steps * sequences, layers, experts, top_k).together(sequences)
    for keys in trace.places():
        while not all(device.copier.native.done(copy.ticket) for copy in shadows.copies.values()):
            pass  # every copy is complete before the next step on any machine, so that runs can be compared
        OTHERS.sum()
        begin()
        started((sequences,), [[1] * sequences])
        counts = np.bincount(keys, minlength=layers * experts).reshape(layers, experts)
        for layer, routed in zip(shadows.layers, counts, strict=True):
            layer.layer.counts.add_(torch.from_numpy(routed))
            layer.layer.hits.add_(int(routed[layer.table != 0].sum()))
        end(True, [random.randrange(4096) for _ in range(sequences)])
    report = shadows.history.report()
    medians = {part: 1e6 * statistics.median(times[part][steps // 10 :]) for part in PARTS}
    row = {"shape": f"{layers} x {experts}", "top_k": top_k, "sequences": sequences, "swap_cost": swap_cost}
    return row | medians | {key: report[key] for key in ("hit_rate", "copies")}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    sizes = DEMO, *((shape.layers, shape.experts, shape.top_k) for shape in (shapes()[name] for name in PUBLISHED))
    cases = [(*shape, sequences, cost) for shape in sizes for sequences in (1, 4) for cost in (1.0, 0.02)]
    rows = printed((measure(*case, args.steps) for case in cases), COLUMNS)
    write_rows(args.json, rows, steps=args.steps)


if __name__ == "__main__":
    main()
