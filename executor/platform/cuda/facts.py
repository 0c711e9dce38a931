"""The facts about CUDA GPUs that need none of their libraries."""

from umbra.executor.config.device import DeviceFacts
from umbra.executor.platform.cuda.settings import CudaSettings
from umbra.ops.formats import SPECS

FACTS = DeviceFacts(
    platform="umbra.executor.platform.cuda.device:CudaPlatform",
    layout="umbra.ops.cuda.layout:CudaLayout",
    exe_modes=("eager", "graph"),
    default_mode="graph",
    page_size=64,
    quantised=tuple(name for name, spec in SPECS.items() if spec.quantised and not spec.record),
    mixes=True,
    expert_slot="umbra.executor.platform.cpu.shadow_device:expert_slot",
    shadow_blocks="umbra.executor.platform.cpu.shadow_device:expert_blocks",
    sections={"cuda_config": CudaSettings},
    rules="umbra.executor.platform.cuda.rules:check",
    memory_key="cuda_config.gpu_memory_gb",
)
