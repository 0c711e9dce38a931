"""The sizes of a model's layer on one die, for the stages that check operators, and whether results are as expected."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Size:
    name: str
    hidden: int
    inner: int  # of an expert
    experts: int
    heads: int
    kv_heads: int
    head_dim: int
    top_k: int


SMALL = Size("small", 128, 64, 8, 4, 2, 64, 2)
WHOLE = Size("30B", 2048, 768, 128, 32, 4, 128, 8)
EIGHTH = Size("30B over 8", 2048, 96, 128, 4, 1, 128, 8)
SIZES = (SMALL, EIGHTH, WHOLE)  # the smallest first


class Differs(RuntimeError):
    """Numbers that are wrong."""


def error(result: Tensor, expected: Tensor) -> float:
    """The norm of the difference relative to the norm of what is expected."""
    ours, theirs = result.detach().cpu().double(), expected.detach().cpu().double()
    if ours.shape != theirs.shape:
        raise Differs(f"the result's shape differs: {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
    if not torch.isfinite(ours).all():
        raise Differs("the result is not finite")
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def require(what: str, result: Tensor, expected: Tensor, tolerance: float) -> float:
    """Raises unless the error is at most `tolerance`; returns it."""
    difference = error(result, expected)
    if difference > tolerance:
        raise Differs(f"{what} differs by {difference:.3g} of its norm, more than {tolerance:g}")
    return difference


MOST_FUSED = 2  # values of a launch


def fused_values(what: str, result: Tensor, expected: Tensor) -> int:
    """Returns the number of values that differ from the kernel's arithmetic, in which every product of MulAddDst is
    rounded before it is added: none, or, on a device that fuses MulAddDst of floats, up to MOST_FUSED by one unit in
    the last place. Raises if there are more or larger differences. NaN equals NaN."""
    ours, theirs = result.detach().cpu(), expected.detach().cpu()
    units = (_ordered(ours) - _ordered(theirs)).abs()
    units[ours.isnan() & theirs.isnan()] = 0
    count = int(units.count_nonzero())
    if count > MOST_FUSED or units.max() > 1:
        raise Differs(
            f"{what}: {count} values differ from the twin's, by up to {int(units.max())} units in the last place; "
            f"a fused MulAddDst changes {MOST_FUSED} at most, by one"
        )
    return count


def _ordered(values: Tensor) -> Tensor:
    """The bits of 16-bit floats as integers that grow with the values, so that neighbours differ by one."""
    bits = values.view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)
