"""FP8 in blocks: the layout of official FP8 checkpoints.

A weight w (out, in) becomes w = q * s: q in float8_e4m3, and for every block of 128 x 128 a float32 scale s, the
block's largest magnitude divided by 448, the largest e4m3. The error is at most |w| / 16, or s / 1024 near zero.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from umbra.base.errors import UserError
from umbra.commands.quantize.target import Target
from umbra.executor.checkpoint.formats.fp8 import BLOCK

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST = torch.finfo(torch.float32).tiny  # scales below it have lost bits


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights (out, in) to the nearest e4m3, ties to even. -> (e4m3 (out, in), scales (out / 128, in / 128)); the
    last blocks may be smaller"""
    rows, columns = weight.shape
    whole = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # (out / 128, 128, in / 128, 128)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    scales = torch.where(scales < SMALLEST, 1, scales)  # all weights become zero: any scale but zero is right
    quants = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return quants.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales


@dataclass(frozen=True)
class Fp8Target(Target):
    @property
    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": self.source.quantised_files.fp8_type,
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [*self.source.fp8_floats, *self.source.mtp_floats],
        }

    def tensors(self, module: str, weight: Tensor) -> dict[str, Tensor]:
        quants, scales = quantise(weight)
        if not scales.isfinite().all():
            raise UserError(f"{module}.weight: holds values that are not finite: check the checkpoint")
        return {f"{module}.weight": quants, f"{module}.weight_scale_inv": scales}
