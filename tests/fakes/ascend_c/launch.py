"""Runs an op as a caller does: its host side decides the launch, and its kernel runs in the twin."""

from __future__ import annotations

from torch import Tensor

from tests.fakes.ascend_c.build import Library, build
from tests.fakes.ascend_c.host import host
from tests.fakes.ascend_c.run import Counts, run
from umbra.base.files import ROOT

KERNELS = ROOT / "ops/ascend/vector_core/op_kernel"
ARGUMENTS = {
    "gemv": ("x", "w", "scales", "zeros"),
    "fused_moe_slots": ("x", "arena", "places", "ids", "weights"),
    "fused_moe_scores": ("x", "w13", "s13", "z13", "w2", "s2", "z2", "scores", "bias"),
    "fused_moe": ("x", "w13", "s13", "z13", "w2", "s2", "z2", "ids", "weights"),
    "unpack": ("w", "scales", "zeros"),
}
OPS = {"gemv": "UmbraGemvW4a16", "fused_moe": "UmbraFusedMoeW4a16", "fused_moe_scores": "UmbraFusedMoeScoresW4a16"}
OPS |= {"fused_moe_slots": "UmbraFusedMoeSlotsW4a16", "unpack": "UmbraUnpackW4a16"}


def launch(
    op: str, *inputs: Tensor | None, attributes: tuple[int, ...], cores: int = 48, library: Library | None = None
) -> tuple[Tensor, Counts]:
    """y and the counts of `op` of ARGUMENTS with `inputs` in their order. `attributes` may leave out float_sums."""
    shapes = [None if t is None else (tuple(t.shape), t.dtype) for t in inputs]
    decided = host(OPS[op], shapes, cores, attributes=attributes)
    given = dict(zip(ARGUMENTS[op], inputs, strict=True))
    made, counts = run(
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
    (y,) = made.values()
    return y, counts
