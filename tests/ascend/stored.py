"""The values of matrices in the layouts of Ascend's products."""

import torch
from torch import Tensor

from tests.ascend.npu_on_cpu import dequantised
from umbra.ops.ascend.vector_core import reference
from umbra.ops.ascend.vector_core.planes import PAIRS, planes_of
from umbra.ops.ascend.weights import Role, StoredMatrices


def values_of(stored: StoredMatrices, *expert: int) -> Tensor:
    """A quantised matrix, or that of an expert, as float32 (outputs, inputs)."""
    assert stored.scales is not None
    words, scales = stored.data[expert], stored.scales[expert]
    offsets = None if stored.offsets is None else stored.offsets[expert]
    if stored.planes is None:
        return dequantised(words, scales, offsets).T
    values = torch.empty(words.shape[-2], stored.columns)
    values[:, stored.planes.order()] = reference.values(words, scales, offsets, stored.planes, torch.float32)
    if stored.role != Role.UP:
        return values
    halves = values.unflatten(0, (-1, 2, PAIRS)).transpose(0, 1).flatten(1, 2)  # (2, inner, inputs)
    ordered = torch.empty_like(halves)
    ordered[:, planes_of(halves.shape[1], stored.format.group, ordered=True).order()] = halves
    return ordered.flatten(0, 1)
