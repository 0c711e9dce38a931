"""The abilities of each platform: static facts, so that a case is checked without importing a platform's libraries."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlatformEntry:
    name: str  # the platform's class, as `module:name`
    layout: str  # the class with the tensor shapes of its ops, which needs no device: for counts of memory
    exe_modes: tuple[str, ...]
    page_size: int  # page size of the KV cache if a case leaves it open
    quantised: tuple[str, ...]  # the kinds of quantised matrices that its ops multiply with
    expert_slot: str  # the function (inner, hidden, format, dtype) -> (bytes, alignment) of an expert's slot
    environment: str = ""  # the function that returns the environment variables of a rank, if there is one
    plugin: str = ""  # the package that brings the device to PyTorch
    mixes: bool = False  # rows of a matrix, and an expert's matrices, may be in several formats
    is_host: bool = False  # the device is the CPU itself: one memory, one pool of threads
    keeps_packed: bool = False  # quantised weights are kept in `packed_cache/`
    plans_memory: bool = False  # `--plan` counts the memory of one rank against the device's

    @property
    def quantised_head(self) -> bool:
        """Whether the output head is quantised to 8 bits if linear layers are quantised."""
        return "q8" in self.quantised


PLATFORMS = {
    "cpu": PlatformEntry(
        "umbra.executor.platform.cpu.device:CpuPlatform",
        "umbra.ops.cpu.layout:CpuLayout",
        ("eager", "graph"),
        page_size=16,
        quantised=("q8", "q4", "f8", "mxfp4", "q4_k", "q5_k", "q6_k", "iq4", "w8a8"),
        expert_slot="umbra.executor.platform.cpu.shadow_device:expert_slot",
        is_host=True,
        mixes=True,
        keeps_packed=True,
    ),
    "ascend": PlatformEntry(
        "umbra.executor.platform.ascend.device:AscendPlatform",
        "umbra.ops.ascend.layout:AscendLayout",
        ("eager", "ge_graph", "acl_graph", "npugraph_ex"),
        page_size=128,
        quantised=("q4", "w8a8"),
        expert_slot="umbra.ops.ascend.vector_core.blocks:expert_slot",
        environment="umbra.executor.platform.ascend.environment:ascend_environment",
        plugin="torch_npu",
        plans_memory=True,
    ),
}
