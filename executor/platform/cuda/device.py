"""NVIDIA GPUs: one GPU, decode in captured CUDA graphs (graphs.py)."""

import importlib.util
from typing import ClassVar, cast

import torch

from umbra.base.errors import REFUSALS, UserError
from umbra.cpu_offload.device import ShadowDevice
from umbra.cpu_offload.planner.choices import Choices
from umbra.executor.config.env import RankEnv
from umbra.executor.platform.base import ModelStep, Platform, graph_rows
from umbra.executor.platform.cuda.errors import refusal
from umbra.executor.platform.cuda.graphs import CudaGraphs
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.config import ModelConfig
from umbra.ops.cuda.ops import CudaOps
from umbra.ops.interface import Ops

OLDEST = 8, 0  # compute capability: of the first GPUs that multiply bfloat16


class CudaPlatform(Platform):
    name: ClassVar[str] = "cuda"
    collectives: ClassVar[str] = "nccl"
    small_graphs: ClassVar[bool] = True

    def __init__(self, settings: PlatformSettings, ranks: RankEnv, device: str = "cuda", kernels: bool = True):
        """`device` "cpu" and `kernels` False are for tests of all but the GPU itself."""
        REFUSALS[self.name] = refusal
        self.settings = settings
        if device == "cuda":
            check_gpu(settings.case, ranks.local_rank)
            self.device = torch.device(device, ranks.local_rank)
            torch.cuda.set_device(self.device)
            print(f"GPU: {torch.cuda.get_device_name(self.device)}")
        else:
            self.device = torch.device(device)
        dtype: torch.dtype = getattr(torch, settings.dtype)
        self.own = CudaOps(dtype, kernels, settings.decode_rows)
        self.ops = cast(Ops, self.own)

    def compile(self, step: ModelStep, model_config: ModelConfig, calls: int = 1) -> ModelStep:
        return CudaGraphs(step, self.device, calls)

    def padded_rows(self, rows: int) -> int:
        return 0 if self.settings.exe_mode == "eager" else graph_rows(rows, self.settings.group_rows)

    def copy_ms(self, nbytes: int) -> float:
        source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        to, times = torch.empty(nbytes, dtype=torch.uint8, device=self.device), []
        for _ in range(COPIES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            to.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)

    def shadow_device(self, top_k: int, choices: Choices) -> ShadowDevice:
        from umbra.executor.platform.cuda.long_steps import Streamed
        from umbra.executor.platform.cuda.shadow_device import CudaDevice

        settings, least, streamed = self.settings, choices.stream_tokens.value, None
        if least > 0:
            streamed = Streamed(max(least, settings.decode_rows + 1), settings.prefill_tokens, choices.costs)
        return CudaDevice(self.own, self.device, top_k, settings.decode_rows, settings.shadow_timeout_s, streamed)

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0


COPIES = 5  # number of copies that are timed; the fastest is taken


def check_gpu(case: str, number: int) -> None:
    """Refuse a machine that has not what this platform needs, before anything is loaded."""
    if not torch.backends.cuda.is_built():
        raise UserError(
            f"case {case}: platform: cuda needs PyTorch with CUDA, and this one ({torch.__version__}) has none"
        )
    if not torch.cuda.is_available() or number >= torch.cuda.device_count():
        raise UserError(
            f"case {case}: platform: cuda needs GPU {number}, and this machine has {torch.cuda.device_count()}"
        )
    if torch.cuda.get_device_capability(number) < OLDEST:
        raise UserError(
            f"case {case}: platform: cuda needs compute capability {'.'.join(map(str, OLDEST))}, and "
            f"{torch.cuda.get_device_name(number)} has less"
        )
    if importlib.util.find_spec("triton") is None:
        raise UserError(f"case {case}: platform: cuda needs Triton, which PyTorch for CUDA brings: pip install triton")
