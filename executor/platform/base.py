"""What a platform is: a device, its memory, its clock, its collectives and its ops."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cpu_offload.device import Device
from executor.config.case import Case
from executor.config.env import RankEnv
from executor.config.platforms import PLATFORMS
from models.batch import Batch
from models.config import ModelConfig
from ops.interface import Ops

Step = Callable[[Batch], Tensor]


class Platform(ABC):
    name: ClassVar[str]
    collectives: ClassVar[str]  # torch.distributed's backend
    device: torch.device
    ops: Ops

    @property
    def quantised_head(self) -> bool:
        """Whether the output head gets 8 bits where linear layers are quantised."""
        return PLATFORMS[self.name].quantised_head

    @abstractmethod
    def __init__(self, case: Case, ranks: RankEnv):
        """Make this rank's device the process's own."""

    @abstractmethod
    def compile(self, step: Step, model_config: ModelConfig) -> Step:
        """`step`, a model's method, as the graphs that the case's `exe_mode` names; takes batches on the host."""

    def kernels(self, model: nn.Module) -> dict[str, str]:
        """What multiplies which weights of `model`, where that was a choice; refuses what the case cannot have."""
        return {}

    def group_options(self, group: str) -> Any:
        """What the collectives' backend wants to know of a group, by its name in `Parallel`."""
        return None

    def padded_rows(self, rows: int) -> int:
        """How many sequences a decode step of `rows` is padded to; 0: it is not."""
        return 0

    def watched(self) -> AbstractContextManager[None]:
        """Around the steps of a run: what goes another way than the case says is told, or is an error."""
        return nullcontext()

    def copy_ms(self, nbytes: int) -> float:
        """Milliseconds of a copy of so many bytes from the host, where that is other memory than the device's."""
        raise NotImplementedError

    @abstractmethod
    def shadow_device(self, top_k: int, stream_tokens: int) -> Device:
        """For a case with shadow experts, `top_k` a token; `stream_tokens`: of a step from which on those that are not
        resident are streamed, -1: never."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Most memory this process has held so far."""
