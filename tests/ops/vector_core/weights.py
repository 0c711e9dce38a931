"""Random weights, and kernels with mistakes."""

import ctypes
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tests.fakes.ascend_c import Library, TwinError, build
from tests.fakes.ascend_c.launch import KERNELS
from umbra.ops.ascend.vector_core.planes import planes_of

Weight = tuple[Tensor, Tensor, Tensor | None]
Mutation = tuple[str, str, str]  # file, what, becomes what


def random_weight(
    experts: int, k: int, n: int, group: int, dtype: torch.dtype, zeros: bool, ordered: bool = False
) -> Weight:
    """w, scales and perhaps zeros of random matrices in planes."""
    planes = planes_of(k, group, ordered)
    w = torch.randint(0, 256, (experts, *planes.words_shape(n)), dtype=torch.uint8)
    scales = torch.rand(experts, *planes.scales_shape(n)) * 0.01 + 0.001
    offsets = torch.randint(-7, 8, scales.shape)
    for kept in (scales, offsets):
        kept[..., planes.groups :] = 0
    return w, scales.to(dtype), offsets.to(dtype) if zeros else None


def distinct(tokens: int, top_k: int, experts: int) -> Tensor:
    """Random ids (T, k), no expert twice for one token."""
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()


def unnoticed(
    tmp_path: Path, kernel: str, mistakes: Mapping[str, Mutation], right: Callable[[Library], bool]
) -> list[str]:
    """Returns those of "no mistake" and `mistakes` with which the kernel is still `right`. A mistake replaces whole
    statements, which end in a semicolon, or an expression; the kernel holds them all, and one variable chooses."""
    folder = tmp_path / "op_kernel"
    shutil.copytree(KERNELS, folder)
    for number, (file, was, becomes) in enumerate(mistakes.values(), 1):
        source = (folder / file).read_text()
        assert source.count(was) == 1, (file, was, source.count(was))
        if was.endswith(";"):
            either = f"if (umbra_mutant == {number}) {{ {becomes} }} else {{ {was} }}"
        else:
            either = f"(umbra_mutant == {number} ? ({becomes}) : ({was}))"
        (folder / file).write_text(source.replace(was, either))
    declared, defined = folder / "umbra_room.h", folder / f"umbra_{kernel}_w4a16.cpp"
    declared.write_text('extern "C" { extern int umbra_mutant; }\n' + declared.read_text())
    defined.write_text(defined.read_text() + '\nextern "C" { __global__ int umbra_mutant = 0; }\n')
    library, kept = build(defined), []
    for number, name in enumerate(("no mistake", *mistakes)):
        ctypes.c_int.in_dll(library.load(), "umbra_mutant").value = number
        torch.manual_seed(0)
        try:
            if right(library):
                kept.append(name)
        except TwinError:
            pass
    return kept
