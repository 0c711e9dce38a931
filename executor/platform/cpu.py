"""The CPU: the newcomer's default, and where everything is tested."""

import resource
from typing import ClassVar

import torch

from cpu_offload.device import CpuDevice, Device
from executor.config.case import Case
from executor.config.env import RankEnv
from executor.platform.base import Platform, Step
from executor.platform.cpu_graph import GraphStep
from ops import load_ops
from ops.cpu.engine import placement, start


class CpuPlatform(Platform):
    name: ClassVar[str] = "cpu"
    collectives: ClassVar[str] = "gloo"

    quantised_head: ClassVar[bool] = True

    def __init__(self, case: Case, ranks: RankEnv):
        torch.set_num_threads(1)  # the native pool has the cores
        self.device, self.decode_tokens = torch.device("cpu"), case.data_config.batch_size
        self.ops = load_ops("cpu")
        shadow = case.offload_config.shadow_threads if case.offload_config.mode != "none" else 0
        chosen = start(case.threads, case.instruction_set, ranks.local_rank, ranks.local_world_size, shadow)
        print(f"native CPU kernels: {chosen}, {placement()}")

    def compile(self, step: Step, model_config: object) -> Step:
        return GraphStep(step)

    def shadow_device(self, top_k: int, stream_tokens: int) -> Device:
        return CpuDevice(stream_tokens, self.decode_tokens)

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
