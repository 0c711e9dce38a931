"""W8A8 by token, in modelslim's layout (executor/checkpoint/formats/modelslim.py): the head, routers and norms stay in
floats, and every row of other matrices has a scale, a 127th of its largest magnitude."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.commands.quantize.source import CONFIG
from umbra.commands.quantize.target import Target
from umbra.executor.checkpoint.formats.modelslim import DYNAMIC, FLOAT
from umbra.executor.checkpoint.formats.patterns import inside
from umbra.executor.checkpoint.formats.scheme import Scheme, Unquantised
from umbra.executor.checkpoint.index import DESCRIPTION
from umbra.ops.formats.w8a8 import quantise

ABOUT = {"model_quant_type": DYNAMIC[0], "version": "1.0.0", "group_size": 0, "metadata": {}}
LAST = ("weight", "weight_scale", "weight_offset")  # names of a module's tensors


@dataclass(frozen=True)
class W8a8Target(Target):
    index = "quant_model_weights.safetensors.index.json"

    @property
    def config(self) -> dict[str, Any]:
        floats = "lm_head", *self.source.quantised_files.floats, self.source.mtp
        return {"quant_method": "modelslim", "modules_to_not_convert": list(filter(None, floats))}

    @cached_property
    def scheme(self) -> Scheme:
        return Unquantised()  # the config does not mention the format

    def quantised(self, module: str) -> bool:
        return module in self.source.linear and not inside(self.quantisation["modules_to_not_convert"])(module)

    def check(self) -> None:
        if self.source.fused:
            raise UserError("--format w8a8: is not for tensors of all experts: mxfp4")
        super().check()

    def tensors(self, module: str, weight: Tensor) -> dict[str, Tensor]:
        if not weight.isfinite().all():
            raise UserError(f"{module}.weight: holds values that are not finite: check the checkpoint")
        part = quantise(weight)
        stored = cast(Tensor, part.levels), part.scales, torch.zeros_like(part.scales)
        return {f"{module}.{last}": tensor for last, tensor in zip(LAST, stored, strict=True)}

    def file(self, number: int, layers: int) -> str:
        return f"quant_model_weights-{number + 1:05}-of-{layers + 1:05}.safetensors"

    def records(self, config: dict[str, Any], tensors: Iterable[str]) -> dict[str, dict[str, Any]]:
        types = dict[str, Any]()
        for name in tensors:
            module, _, last = name.rpartition(".")
            types[name] = (DYNAMIC if last in LAST and self.quantised(module) else FLOAT)[0]
        plain = {
            key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")
        }
        return {DESCRIPTION[0]: types | ABOUT, CONFIG: plain}
