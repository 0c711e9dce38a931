"""Runs an op as a caller does: its host side decides the launch, and its kernel runs in the twin."""

import shutil
from pathlib import Path

import torch
from torch import Tensor

from files import ROOT
from tests.fakes.ascend_c import Counts, build, host, run

KERNELS = ROOT / "ops/ascend/vector_core/op_kernel"
ARGUMENTS = {
    "gemv": ("x", "w", "scales", "zeros"),
    "fused_moe_slots": ("x", "arena", "places", "ids", "weights"),
    "fused_moe": ("x", "w13", "s13", "z13", "w2", "s2", "z2", "ids", "weights"),
}
OPS = {
    "gemv": "UmbraGemvW4a16",
    "fused_moe": "UmbraFusedMoeW4a16",
    "fused_moe_slots": "UmbraFusedMoeSlotsW4a16",
}


def launch(
    op: str,
    *inputs: Tensor | None,
    cores: int = 48,
    folder: Path = KERNELS,
    half_sums: bool = False,
    attributes: tuple[int, ...] = (),
) -> tuple[Tensor, Counts]:
    """y and the counts of `op` of ARGUMENTS with `inputs` in their order, by the kernels in `folder`. `attributes` are
    those before half_sums. Kernels of another folder are mutants, which run once: they are compiled fast."""
    shapes = [None if t is None else (tuple(t.shape), t.dtype) for t in inputs]
    decided = host(OPS[op], shapes, cores, attributes=[*attributes, half_sums])
    given = dict(zip(ARGUMENTS[op], inputs, strict=True))
    library = build(folder / f"umbra_{op}_w4a16.cpp", optimise="-O2" if folder == KERNELS else "-O0")
    made, counts = run(
        library, f"umbra_{op}_w4a16", given, decided.outputs, decided.tiling, decided.workspace, decided.blocks,
        decided.key, decided.schedule_mode,
    )  # fmt: skip
    (y,) = made.values()
    return y, counts


def random_weight(
    experts: int, k: int, n: int, group: int, dtype: torch.dtype, zeros: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """w (E, K, N / 8), scales and perhaps zeros (E, K / G, N)."""
    w = torch.randint(-(1 << 31), 1 << 31, (experts, k, n // 8)).to(torch.int32)
    scales = (torch.rand(experts, k // group, n) * 0.01 + 0.001).to(dtype)
    return w, scales, torch.randint(-7, 8, scales.shape).to(dtype) if zeros else None


def distinct(tokens: int, top_k: int, experts: int) -> Tensor:
    """Random ids (T, k), no expert twice for one token."""
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()


def mutated(tmp_path: Path, file: str, right: str, wrong: str) -> Path:
    """A copy of the kernels' folder in which the one `right` of `file` is `wrong`."""
    folder = tmp_path / "op_kernel"
    shutil.copytree(KERNELS, folder)
    source = (folder / file).read_text()
    assert source.count(right) == 1
    (folder / file).write_text(source.replace(right, wrong))
    return folder
