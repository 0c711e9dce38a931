"""The interface of a format that checkpoints are written in."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from umbra.base.errors import UserError
from umbra.commands.quantize.source import CONFIG, CheckpointSource
from umbra.executor.checkpoint.formats.detect import SCHEMES
from umbra.executor.checkpoint.formats.patterns import inside
from umbra.executor.checkpoint.formats.scheme import Scheme
from umbra.executor.checkpoint.index import INDEX
from umbra.models.hf_config import HfConfig

REST = "model-rest.safetensors"


@dataclass(frozen=True)
class Target(ABC):
    source: CheckpointSource
    keep: tuple[str, ...]  # paths of modules that stay in floats, or whole parts of paths
    index = INDEX

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The value of `quantization_config` in config.json, without the modules in `keep`."""

    @abstractmethod
    def tensors(self, module: str, weight: Tensor) -> dict[str, Tensor]:
        """The tensors that store the weight (out, in) of a module."""

    def check_sizes(self, rows: int, columns: int) -> str:
        """Returns what is wrong with the sizes of a matrix; empty if it can be written."""
        return ""

    def file(self, number: int, layers: int) -> str:
        """The name of the file of layer `number`, or for `layers` of the file of all else."""
        return f"model-layer-{number:05}.safetensors" if number < layers else REST

    def records(self, config: dict[str, Any], tensors: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The JSON files beside the index that say what `tensors` are, in order, for a source with this config."""
        return {CONFIG: config | {"quantization_config": self.quantisation}}

    @cached_property
    def quantisation(self) -> dict[str, Any]:
        excluded = [*self.config["modules_to_not_convert"], *self.keep]
        return self.config | {"modules_to_not_convert": excluded}

    @cached_property
    def scheme(self) -> Scheme:
        """The scheme that readers make of the config: it says which modules are quantised."""
        return SCHEMES[self.quantisation["quant_method"]](HfConfig(self.quantisation, CONFIG))

    def quantised(self, module: str) -> bool:
        return module in self.source.linear and self.scheme.said(module) is not None

    def check(self) -> None:
        """Refuse a source in this format, sizes that it cannot store, and modules to keep that the model does not
        have."""
        source = self.source
        if source.encodings.intersection(map(type, self.scheme.encodings)):
            raise UserError(f"--model {source.folder}: is quantised already ({source.scheme.title})")
        for name in self.keep:
            if not any(map(inside([name]), source.linear)):
                raise UserError(f"--keep {name}: is no module of {source.folder}, and no part of one's path")
        for module, (*_, rows, columns) in source.linear.items():
            if self.quantised(module) and (wrong := self.check_sizes(rows, columns)):
                weight = module if module in source.fused else f"{module}.weight"
                raise UserError(f"{source.folder}: {weight}: {wrong}")
