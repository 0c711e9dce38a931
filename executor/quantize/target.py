"""The interface of a format that checkpoints are written in."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from errors import UserError
from executor.checkpoint.formats.detect import SCHEMES
from executor.checkpoint.formats.scheme import Scheme
from executor.quantize.source import CONFIG, Source
from models.hf_config import HfConfig


@dataclass(frozen=True)
class Target(ABC):
    source: Source
    keep: tuple[str, ...]  # paths of modules that stay in floats, or whole parts of paths

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The value of `quantization_config` in config.json, without the modules in `keep`."""

    @abstractmethod
    def tensors(self, module: str, weight: Tensor) -> dict[str, Tensor]:
        """The tensors that store the weight (out, in) of a module."""

    @abstractmethod
    def check_sizes(self, rows: int, columns: int) -> str:
        """What is wrong with the sizes of a matrix; empty if it can be written."""

    @cached_property
    def quantisation(self) -> dict[str, Any]:
        excluded = [*self.config["modules_to_not_convert"], *self.keep]
        return self.config | {"modules_to_not_convert": excluded}

    @cached_property
    def scheme(self) -> Scheme:
        """What readers make of the config: it says which modules are quantised."""
        return SCHEMES[self.quantisation["quant_method"]](HfConfig(self.quantisation, CONFIG))

    def quantised(self, name: str) -> bool:
        """Whether the weight `name` is quantised."""
        return self.source.pieces[name].linear and self.scheme.quantised(name.removesuffix(".weight"))

    def check(self) -> None:
        """Refuse a source in this format, sizes that it cannot store, and modules to keep that the model does not
        have."""
        if self.source.scheme.title == self.scheme.title:
            raise UserError(f"--model {self.source.folder}: is quantised already ({self.scheme.title})")
        linears = [name for name, piece in self.source.pieces.items() if piece.linear]
        for name in self.keep:
            if not any(f".{name.strip('.')}." in f".{linear}." for linear in linears):
                raise UserError(f"--keep {name}: is no module of {self.source.folder}, and no part of one's path")
        for name in linears:
            if self.quantised(name) and (wrong := self.check_sizes(*self.source.pieces[name].shape)):
                raise UserError(f"{self.source.folder}: {name}: {wrong}")
