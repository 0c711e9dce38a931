"""Pinned memory of the host, which the NPU copies from and to while the host goes on."""

import torch
from torch import Tensor

from umbra.errors import UserError


def pinned(shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
    """Returns an uninitialised pinned tensor. If CANN has no pinned memory left, it raises a UserError that begins with
    `what`; torch_npu 2.13.0 itself does not raise then, but returns a tensor at address 0."""
    made = torch.empty(shape, dtype=dtype, pin_memory=True)
    if made.numel() and not made.data_ptr():
        raise UserError(f"{what}: no pinned memory on the host for {dtype} {shape}")
    return made
