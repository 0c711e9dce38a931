"""The section of a case that only this device reads."""

from dataclasses import dataclass

from umbra.executor.config.schema import key


@dataclass(frozen=True)
class CudaSettings:
    gpu_memory_gb: int = key(80, "memory of one GPU, for plans", minimum=1, maximum=1024)
