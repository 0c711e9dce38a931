"""MXFP4 of all experts' weights in one tensor: the layout of official checkpoints (executor/checkpoint/formats).

A weight becomes w = q * 2^e: q an e2m1 float, and for every 32 columns of a row an exponent e, of two the one with the
smaller squared error. Weights that were MXFP4 before keep their values.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.commands.quantize.target import Target
from umbra.executor.checkpoint.formats.mxfp4 import GROUP
from umbra.executor.checkpoint.formats.patterns import inside
from umbra.ops.formats.mxfp4 import E2M1

BIAS = 127  # of stored exponents
SIGN = 8  # bit of a code


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights (..., in) to the nearest levels. -> (codes (..., in / 32, 32), stored exponents (..., in / 32))"""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    # With the first exponent, magnitudes lie below 8, of which those above 6 become 6.
    first = torch.frexp(groups.abs().amax(-1)).exponent - 3
    exponents, codes, errors = zip(*(_rounded(groups, first + more) for more in (0, 1)), strict=True)
    better = errors[1] < errors[0]
    return torch.where(better[..., None], codes[1], codes[0]), torch.where(better, exponents[1], exponents[0])


def _rounded(groups: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> stored exponents, codes, squared error of each group"""
    exponents = exponents.clamp(-BIAS, BIAS)
    scales, levels = exponents[..., None].float().exp2(), groups.new_tensor(E2M1)
    codes = torch.bucketize((groups / scales).abs(), (levels[: SIGN - 1] + levels[1:SIGN]) / 2) | (groups < 0) * SIGN
    errors = (levels[codes] * scales - groups).square().sum(-1)
    return (exponents + BIAS).to(torch.uint8), codes.to(torch.uint8), errors


@dataclass(frozen=True)
class Mxfp4Target(Target):
    @property
    def config(self) -> dict[str, Any]:
        floats = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": floats}

    def quantised(self, module: str) -> bool:
        return super().quantised(module) and not inside(self.keep)(module)

    def check(self) -> None:
        if not self.source.fused:
            raise UserError(
                f"--format mxfp4: is for tensors of all experts, which {self.source.folder} has not: awq or fp8"
            )
        super().check()

    def check_sizes(self, rows: int, columns: int) -> str:
        return f"{columns} columns are not a multiple of {GROUP}, as this format needs" if columns % GROUP else ""

    def tensors(self, module: str, weight: Tensor) -> dict[str, Tensor]:
        if not weight.isfinite().all():
            raise UserError(f"{module}: holds values that are not finite: check the checkpoint")
        codes, exponents = quantise(weight)
        return {f"{module}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{module}_scales": exponents}
