"""The facts about the CPU as a device."""

from umbra.executor.config.device import DeviceFacts
from umbra.ops.formats import SPECS

FACTS = DeviceFacts(
    platform="umbra.executor.platform.cpu.device:CpuPlatform",
    layout="umbra.ops.cpu.layout:CpuLayout",
    exe_modes=("eager", "graph"),
    default_mode="graph",
    page_size=16,
    page_multiple=2,  # values are kept in pairs of tokens
    quantised=tuple(name for name, spec in SPECS.items() if spec.quantised),
    expert_slot="umbra.executor.platform.cpu.shadow_device:expert_slot",
    shadow_blocks="umbra.executor.platform.cpu.shadow_device:expert_blocks",
    activations="float32",
    mixes=True,
    keeps_packed=True,
)
