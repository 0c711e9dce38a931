"""The interface of a platform: a device, its memory, its collectives, its graphs and its ops."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from umbra.cpu_offload.device import ShadowDevice
from umbra.cpu_offload.planner.choices import Choices
from umbra.executor.config.env import RankEnv
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.batch import Batch
from umbra.models.config import ModelConfig
from umbra.ops.interface import Exchange, Ops

ModelStep = Callable[[Batch], Any]  # -> logits, or several tensors


class Platform(ABC):
    name: ClassVar[str]
    collectives: ClassVar[str]  # torch.distributed's backend
    # Whether graphs take little memory and time to capture, so that a step without guesses has graphs of its own.
    small_graphs: ClassVar[bool] = False
    device: torch.device
    ops: Ops

    @property
    def quantised_head(self) -> bool:
        """Says whether the output head is quantised to 8 bits if linear layers are quantised."""
        return PLATFORMS[self.name].quantised_head

    @abstractmethod
    def __init__(self, settings: PlatformSettings, ranks: RankEnv):
        """Take this rank's device for the whole process."""

    @abstractmethod
    def compile(self, step: ModelStep, model_config: ModelConfig, calls: int = 1) -> ModelStep:
        """`step`, a method of a model, run through graphs as `exe_mode` says. The result takes batches on the host, of
        which some tensors may be on the device. The host reads something of the device after at most `calls` calls."""

    def kernels(self, model: nn.Module) -> dict[str, str]:
        """The kernels that multiply by the weights of parts of `model` for which there was a choice. Raises if the case
        names a kernel that its weights do not fit."""
        return {}

    def exchange(self, config: ModelConfig) -> Exchange | None:
        """Sends the experts' rows of a model to the ranks of their experts; None: rows of all ranks are gathered. All
        ranks call this together."""
        return None

    def group_options(self, group: str) -> Any:
        """Options of the collectives' backend for a rank group, by the group's name in `Parallel`."""
        return None

    def padded_rows(self, rows: int) -> int:
        """Number of sequences that a decode step of `rows` sequences is padded to; 0: it is not padded."""
        return 0

    def watched(self) -> AbstractContextManager[None]:
        """Context of the steps of a run, in which a fallback to slower code is printed, or with `strict` raised."""
        return nullcontext()

    def copy_ms(self, nbytes: int) -> float:
        """Measured milliseconds of a copy of `nbytes` from the host, on devices with memory of their own."""
        raise NotImplementedError

    def shadow_device(self, top_k: int, choices: Choices) -> ShadowDevice:
        """The device side of shadow experts, on devices that have them, for models with `top_k` experts a token. In
        steps of `choices.stream_tokens` tokens or more, missing experts are copied to it; 0: in none."""
        raise NotImplementedError

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Most memory that this process has held so far."""


def graph_rows(rows: int, most: int) -> int:
    """Number of sequences in the decode graph that runs `rows` of them: the next power of two, at most `most`, a whole
    batch. Few sizes, because each graph takes streams and tasks of the device."""
    return min(1 << (rows - 1).bit_length(), most)
