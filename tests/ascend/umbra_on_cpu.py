"""Registers, when imported, the reference's implementations of the vector-core ops for the CPU."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tests.fakes.ascend_c.launch import OPS, launch
from umbra.ops.ascend.shadow import ShadowNodes
from umbra.ops.ascend.vector_core import reference, signatures
from umbra.tools.npu_check.numbers import SMALL

LIBRARY = torch.library.Library("umbra", "IMPL")
CALLS: Counter[str] = Counter()
TWIN: set[str] = set()  # ops that the twin computes where the model is small: npu_check compares its bits


def counted(name: str) -> Any:
    def op(*given: Any) -> Tensor | None:
        CALLS[name] += 1
        if name in TWIN and given[0].shape[1] == SMALL.hidden:
            kernel = name.removesuffix("_w4a16")
            tensors = len(OPS[kernel].operands)
            return launch(kernel, *given[:tensors], attributes=given[tensors:])[0]
        result: Tensor | None = reference.compute(name, *given)
        return result

    return op


for name in signatures.CALLS:
    LIBRARY.impl(name, counted(name), "CPU")


def shadow_submit(
    x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, layer: int, nodes: int
) -> tuple[Tensor, Tensor]:
    """Copies run at once here, the callback when the fake device reaches it."""
    return ShadowNodes.alive[nodes].submit(x, ids, weights, places, layer)


def shadow_join(sums: Tensor, own: Tensor, layer: int, nodes: int) -> Tensor:
    torch.npu.synchronize()
    node = ShadowNodes.alive[nodes].nodes[len(own), layer]
    return ShadowNodes.alive[nodes].join(node.sums, own, layer)


def shadow_rows(x: Tensor, ids: Tensor, out: Tensor, layer: int, nodes: int) -> None:
    node = ShadowNodes.alive[nodes].of_rows[layer]
    for part, chosen, result in zip(x.split(len(node.x)), ids.split(len(node.x)), out.split(len(node.x)), strict=True):
        ShadowNodes.alive[nodes].rows(part, chosen, result, layer)
        torch.npu.synchronize()
        result.copy_(node.sums[: len(part)])


LIBRARY.impl("shadow_rows", shadow_rows, "CPU")
LIBRARY.impl("shadow_submit", shadow_submit, "CPU")
LIBRARY.impl("shadow_join", shadow_join, "CPU")
