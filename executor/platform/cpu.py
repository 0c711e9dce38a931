"""The CPU: the newcomer's default, and where everything is tested."""

import resource
from typing import ClassVar

import torch

from executor.platform.base import Platform, Step
from ops import load_ops


class CpuPlatform(Platform):
    name: ClassVar[str] = "cpu"
    collectives: ClassVar[str] = "gloo"

    def __init__(self, local_rank: int, threads: int):
        torch.set_num_threads(threads)
        self.device = torch.device("cpu")
        self.ops = load_ops("cpu")

    def compile(self, step: Step, exe_mode: str) -> Step:
        if exe_mode != "eager":
            raise NotImplementedError(f"{exe_mode} on {self.name}")  # the configuration has refused it
        return step

    def synchronize(self) -> None:
        pass  # every op has returned its result

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
