"""The host side of ops in the twin: the launch that follows from shapes and types; refusals."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.ascend_c import LIBRARY_WORKSPACE, Launch, TwinError, host, run
from tests.ops.vector_core.test_twin import PROBES, probes

pytestmark = pytest.mark.slow

HALF, BRAIN = torch.half, torch.bfloat16


def probe_op(*inputs: tuple[tuple[int, ...], torch.dtype] | None, op: str = "ProbeOp") -> Launch:
    return host(op, inputs, cores=6, folder=PROBES / "op_host")


def test_launch_runs_the_kernel() -> None:
    launch = probe_op(((7, 4), BRAIN), None, ((4, 5), BRAIN))
    assert launch.outputs == {"y": ((7, 5), BRAIN)}
    assert (launch.key, launch.blocks, launch.workspace) == (2, 3, LIBRARY_WORKSPACE + 64)
    outputs = {"y": ((3, 8), torch.int32)}
    y = run(probes("ops"), "tiling_and_ids", {"absent": None}, outputs, launch.tiling, launch.workspace, 3, launch.key)[
        0
    ]["y"]
    assert y[2].tolist() == [7, 5, 99, 2, 3, 1, 1, 0]


def test_optional_input_moves_nothing() -> None:
    with_bias = probe_op(((7, 4), HALF), ((5,), HALF), ((4, 5), HALF))
    assert with_bias.outputs == {"y": ((7, 5), HALF)}
    assert with_bias.key == 1
    assert with_bias.tiling[16] == 1


def test_refusals() -> None:
    x, w = ((7, 4), HALF), ((4, 5), HALF)
    with pytest.raises(TwinError, match=r"ProbeOp: tiling refuses\. \[ERROR\] ProbeOp: 3 columns"):
        probe_op(((7, 3), HALF), None, w)
    with pytest.raises(TwinError, match="the input w is required"):
        probe_op(x, None, None)
    with pytest.raises(TwinError, match="no variant of the definition has these types"):
        probe_op(x, None, ((4, 5), BRAIN))
    with pytest.raises(TwinError, match="the op has 3 inputs"):
        probe_op(x, w)
    with pytest.raises(TwinError, match="the op has 0 attributes"):
        host("ProbeOp", [x, None, w], folder=PROBES / "op_host", attributes=[True])
    with pytest.raises(TwinError, match="no such op is registered"):
        probe_op(x, None, w, op="Other")
