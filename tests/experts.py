"""Random experts for tests, the same in several places."""

from typing import Protocol

import torch
from torch import Tensor

from umbra.ops.formats import Format
from umbra.ops.interface import SILU_EXPERTS, ExpertKind

CLIPPED = ExpertKind(limit=0.8, alpha=1.702, biased=True)


class FillTarget(Protocol):
    def fill(self, expert: int, which: str, part: Tensor, /) -> object: ...

    def fill_bias(self, expert: int, which: str, part: Tensor, /) -> None: ...


def kind_of(format: Format) -> ExpertKind:
    """Returns the activation of the tests' experts in `format`."""
    return CLIPPED if format.kind in ("bfloat16", "mxfp4") else SILU_EXPERTS


def fill_experts(count: int, inner: int, hidden: int, kind: ExpertKind, *places: FillTarget) -> None:
    """Fills `count` experts in all `places`."""
    for expert in range(count):
        for which, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            part, bias = torch.randn(rows, columns) / columns**0.5, torch.randn(rows)
            for target in places:
                target.fill(expert, which, part)
                if kind.biased:
                    target.fill_bias(expert, which, bias)
