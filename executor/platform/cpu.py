"""The CPU: the newcomer's default, and where everything is tested."""

import resource
from typing import ClassVar

import torch

from executor.platform.base import Platform, Step
from executor.platform.cpu_graph import GraphStep
from ops import load_ops
from ops.cpu.engine import placement, start


class CpuPlatform(Platform):
    name: ClassVar[str] = "cpu"
    collectives: ClassVar[str] = "gloo"

    def __init__(self, local_rank: int, local_ranks: int, threads: int, instruction_set: str):
        torch.set_num_threads(1)  # the native pool has the cores
        self.device = torch.device("cpu")
        self.ops = load_ops("cpu")
        _, chosen = start(threads, instruction_set, local_rank, local_ranks)
        print(f"native CPU kernels: {chosen}, {placement()}")

    def compile(self, step: Step, exe_mode: str) -> Step:
        return GraphStep(step) if exe_mode == "graph" else step

    def synchronize(self) -> None:
        pass  # every op has returned its result

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
