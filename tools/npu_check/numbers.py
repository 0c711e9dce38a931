"""Compares results of the device with expected ones."""

import torch
from torch import Tensor


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
    found = error(result, expected)
    if found > tolerance:
        raise Differs(f"{what} differs by {found:.3g} of its norm, more than {tolerance:g}")
    return found
