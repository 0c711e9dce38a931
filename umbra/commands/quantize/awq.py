"""Four-bit groups and AutoAWQ's "gemm" layout of them.

A weight w (out, in) becomes w = (q - z) * s: q from 0 to 15, and for every `group` columns of a row a zero point z from
0 to 15 and a float16 scale s. On disk all three are transposed, and eight neighbouring outputs share an int32.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.commands.quantize.target import Target
from umbra.ops.formats import INTEGERS
from umbra.ops.formats.quantised import Quantised

BITS, LARGEST = 4, 15
PACKED = 32 // BITS  # outputs in one int32
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of output j: SHIFTS[j % 8]


def quantise(weight: Tensor, group: int) -> Quantised:
    """Round weights (out, in) to the nearest of 16 steps, each by at most half its group's scale."""
    groups = weight.float().unflatten(1, (-1, group))  # (out, in / group, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    exact = (high - low) / LARGEST
    # Round up to the next float16, so that 16 steps span the group even where float16 is coarse. Among positive floats,
    # the next larger one has the next larger bit pattern.
    near = exact.half()
    scales = (near.view(torch.int16) + (near.float() < exact)).view(torch.float16)
    scales = torch.where(exact == 0, 1, scales)  # all weights are zero: any scale but zero is right
    step = scales.float()
    zeros = (-low / step).round_()
    quants = (groups / step[..., None]).round_().add_(zeros[..., None]).clamp_(0, LARGEST)
    return Quantised(INTEGERS[BITS], quants.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8))


def pack(values: Tensor) -> Tensor:
    """Pack values from 0 to 15: (rows, out) -> (rows, out / 8) int32."""
    words = torch.zeros(values.shape[0], values.shape[1] // PACKED, dtype=torch.int32)
    for j, shift in enumerate(SHIFTS):
        words |= values[:, j::PACKED].int() << shift
    return words


def packed_linear(name: str, weight: Tensor, group: int) -> dict[str, Tensor]:
    """The three tensors that replace `name`.weight in the checkpoint."""
    q = quantise(weight, group)
    if not q.scales.isfinite().all():
        raise UserError(
            f"{name}.weight: holds values that are not finite or too large for float16 scales: check the checkpoint"
        )
    return {
        f"{name}.qweight": pack(q.plain_levels.T),  # (in, out / 8)
        f"{name}.qzeros": pack(cast(Tensor, q.zeros).T),  # (in / group, out / 8)
        f"{name}.scales": q.scales.T.contiguous(),  # (in / group, out)
    }


@dataclass(frozen=True)
class AwqTarget(Target):
    group: int  # columns that share a scale

    @property
    def config(self) -> dict[str, Any]:
        floats = [*self.source.quantised_files.floats, *filter(None, [self.source.mtp])]
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": BITS,
            "group_size": self.group,
            "zero_point": True,
            "modules_to_not_convert": floats,
        }

    def check_sizes(self, rows: int, columns: int) -> str:
        if columns % self.group:
            return f"{columns} columns are not a multiple of --group {self.group}: choose another"
        return f"{rows} rows are not a multiple of {PACKED}, as this format needs" if rows % PACKED else ""

    def tensors(self, module: str, weight: Tensor) -> dict[str, Tensor]:
        return packed_linear(module, weight, self.group)
