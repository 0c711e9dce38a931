"""Stage 5: captured graphs and GE give what eager mode gives; what launches and copies take."""

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_npu

from umbra.ops.ascend.host_memory import pinned
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.ascend.weights import AscendMatrix
from umbra.ops.formats import Format
from umbra.tools.benchmarks.npu_layers import Graph, alternate
from umbra.tools.npu_check.environment import ascend_overrides
from umbra.tools.npu_check.numbers import require
from umbra.tools.npu_check.outcome import Check, Passed
from umbra.tools.npu_check.stage import CAPTURES
from umbra.tools.npu_check.stages import model

NPU, BF16 = torch.device("npu"), torch.bfloat16
TOLERANCE = 0.01  # a graph may fuse what eager mode rounds
LAUNCHES, ROUNDS, COPIED = 200, 10, 256 << 20


def checks(logs: Path) -> list[Check]:
    modes = ("ge_graph", "acl_graph", CAPTURES)
    return [
        Check("captured graph", captured),
        Check("launches", launches),
        Check("copies", copies),
        *(Check(mode, partial(against_eager, logs, mode)) for mode in modes),
    ]


def captured() -> Passed:
    """Replays must follow their inputs, which change in place."""
    torch.manual_seed(0)
    ops = AscendOps(BF16, NPU, "fusion_v2")
    matrix = AscendMatrix(128, 64, Format("bfloat16"), BF16, NPU)
    matrix.fill(0, torch.randn(128, 64))
    x = torch.zeros(4, 64, dtype=BF16, device=NPU)

    def step() -> torch.Tensor:
        return ops.silu_mul(ops.linear(x, matrix, None))

    graph = Graph([step])
    for number in range(3):
        x.copy_(torch.randn(4, 64))
        graph.replay()
        torch_npu.npu.synchronize()
        require(f"replay {number}", graph.results[0], step(), 1e-3)
    return Passed()


def launches() -> Passed:
    """A kernel of 32 numbers, many times: the time of one is that of its launch."""
    x = torch.zeros(32, device=NPU)

    def run() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    graph = Graph([lambda: x.add_(1) for _ in range(LAUNCHES)])
    us = {
        name: seconds / LAUNCHES for name, seconds in alternate({"eager": run, "graph": graph.replay}, ROUNDS).items()
    }
    measured = {"eager_us": us["eager"], "graph_us": us["graph"]}
    return Passed(f"{us['eager']:.2f} us eager, {us['graph']:.2f} us in a graph", {"launches": measured})


def copies() -> Passed:
    host = pinned((COPIED,), torch.uint8, "copies")
    device = torch.empty(COPIED, dtype=torch.uint8, device=NPU)
    runs: dict[str, Callable[[], object]] = {
        "h2d_gbps": lambda: device.copy_(host, non_blocking=True),
        "d2h_gbps": lambda: host.copy_(device, non_blocking=True),
    }
    rates: dict[str, Any] = {name: COPIED / us / 1e3 for name, us in alternate(runs, ROUNDS).items()}
    return Passed(f"{rates['h2d_gbps']:.1f} GB/s to the device, {rates['d2h_gbps']:.1f} from it", {"copies": rates})


@functools.cache
def eager_logits(logs: Path) -> model.Logits:
    return model.logits_of(ascend_overrides("exe_mode=eager"), logs / "eager")[0]


def against_eager(logs: Path, mode: str) -> Passed:
    """The demo model's decode steps with the tokens of eager mode."""
    expected = eager_logits(logs)
    ours, measured = model.logits_of(ascend_overrides(f"exe_mode={mode}"), logs / mode, expected)
    return Passed(f"{model.compare(ours, expected, TOLERANCE)}; {model.summary(measured)}", measured)
