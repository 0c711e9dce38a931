"""What a platform is: a device, its memory, its clock, its collectives and its ops."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from models.batch import Batch
from ops.interface import Ops

Step = Callable[[Batch], Tensor]


class Platform(ABC):
    name: ClassVar[str]
    collectives: ClassVar[str]  # torch.distributed's backend
    device: torch.device
    ops: Ops

    @abstractmethod
    def __init__(self, local_rank: int, local_ranks: int, threads: int, instruction_set: str):
        """Make device `local_rank`, of as many as there are ranks on this machine, this process's own; `threads` (0:
        the platform's choice) and `instruction_set` for the CPU side."""

    @abstractmethod
    def compile(self, step: Step, exe_mode: str) -> Step:
        """`step` in the form that `exe_mode` names."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all that was asked of the device is done."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Most memory this process has held so far."""
