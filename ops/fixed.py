"""Tensors that keep their address."""

from torch import Tensor, nn


def fixed(tensor: Tensor) -> nn.Parameter:
    """`tensor` as a Parameter without a gradient: captured graphs take Parameters by their address."""
    return nn.Parameter(tensor, requires_grad=False)
