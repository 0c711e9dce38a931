"""Runs an op as a caller does: its host side decides the launch, and its kernel runs in the twin."""

from __future__ import annotations

from torch import Tensor

from tests.fakes.ascend_c.build import Library, build
from tests.fakes.ascend_c.host import host
from tests.fakes.ascend_c.run import Counts, run
from umbra.base.files import ROOT
from umbra.ops.ascend.vector_core import signatures

KERNELS = ROOT / "ops/ascend/vector_core/op_kernel"
OPS = {op.name.removesuffix("_w4a16"): op for op in signatures.OPS}


def launch(
    op: str, *inputs: Tensor | None, attributes: tuple[int, ...], cores: int = 48, library: Library | None = None
) -> tuple[Tensor, Counts]:
    """y and the counts of `op` of OPS with `inputs` in their order. `attributes` may leave out float_sums."""
    shapes = [None if t is None else (tuple(t.shape), t.dtype) for t in inputs]
    decided = host(OPS[op].ge_name, shapes, cores, attributes=attributes)
    given = dict(zip((operand.name for operand in OPS[op].operands), inputs, strict=True))
    written, counts = run(
        library or build(KERNELS / f"umbra_{op}_w4a16.cpp"),
        f"umbra_{op}_w4a16",
        given,
        decided.outputs,
        decided.tiling,
        decided.workspace,
        decided.blocks,
        decided.key,
        decided.schedule_mode,
    )
    (y,) = written.values()
    return y, counts
