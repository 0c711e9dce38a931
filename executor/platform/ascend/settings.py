"""The sections of a case that only this device reads."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from umbra.executor.config.schema import OPEN, key
from umbra.ops.parallel.partitions import GROUPS


@dataclass(frozen=True)
class AscendSettings:
    moe_routing: str = key(
        "fusion_v2",
        "operators that sort tokens by expert. fusion_v2: npu_moe_init_routing_v2; fusion_v1: the first "
        "generation of fused routing; tp: plain operators. The products are grouped matmuls in all three",
        choices=("fusion_v2", "fusion_v1", "tp"),
    )
    decode_gemv: str = key(
        "auto",
        "whether steps of few tokens multiply by 4-bit weights with our own kernels for the vector cores, "
        "which `bash ops/ascend/vector_core/build.sh` builds. auto: if they are built and fit the weights; on: yes, "
        "and an error if they are not built or do not fit; off: no. AIV collectives compete with them for these "
        "cores: compare `off` with `hccl_config.aiv_group: none`",
        choices=("auto", "on", "off"),
    )
    gemv_max_tokens: int = key(8, "most tokens of a step that uses the kernels of `decode_gemv`", minimum=1, maximum=8)
    gemv_float_sums: bool = key(
        False, "add products in float32 from the first on, not eight in float16: slower (docs/vector_core.md)"
    )
    super_kernel: bool = key(
        False,
        "launch the kernels of a layer's experts as one: a scope in ge_graph, super_kernel_optimize in "
        "npugraph_ex. Never tried on hardware",
    )
    exchange: bool = key(
        True,
        "where attn_tp_size and moe_tp_size are 1, send the rows of a decode step to the ranks of their experts "
        "(Atlas A3, CANN 8.5 or later), over a communicator of their own; false: gather the rows of all ranks",
    )
    prefetch: bool = key(
        False,
        "read the attention weights of the next layer into the L2 cache while the experts' sums go over ranks "
        "(npu_prefetch, in graphs). Never tried on hardware",
    )
    static_kernels: bool = key(
        False,
        "compile kernels for the sizes of each captured step (npugraph_ex), which takes minutes at the start. "
        "Never tried on hardware",
    )
    memory_gb: int = key(64, "memory of one die, for `--plan` and its check", minimum=1, maximum=1024)
    cpu_affinity: bool = key(True, "keep each rank on the cores of its NPU's NUMA node (torch_npu's CPU_AFFINITY_CONF)")
    base_port: int | None = key(
        None,
        "first of the 16 host ports HCCL uses (HCCL_IF_BASE_PORT); 0: HCCL's own choice",
        means=OPEN,
        minimum=0,
        maximum=65520,
    )
    socket_ifname: str = key(
        "", "network interface over which HCCL's ranks connect (HCCL_SOCKET_IFNAME); empty: HCCL's choice"
    )


def _own_buffer(of: str) -> Any:
    return key(None, f"buffer_mb for {of}; 0: the value of buffer_mb", means=OPEN, minimum=0, maximum=65536)


@dataclass(frozen=True)
class HcclSettings:
    aiv_group: str = key(
        "attn_tp",
        "the one group whose collectives run on the vector cores (AIV), with every group of the same "
        "ranks; `none` switches AIV off and leaves those cores to `ascend_config.decode_gemv`. Experts are summed by "
        "one all-reduce over `world`, which covers moe_tp and moe_ep",
        choices=("none", *GROUPS),
    )
    deterministic: bool = key(False, "collectives sum in the same order every time; needs `aiv_group: none`")
    buffer_mb: int = key(
        200,
        "size of HCCL's buffers of each group; a group has two, and is slow with data larger than one",
        minimum=1,
        maximum=65536,
    )
    world_buffer_mb: int | None = _own_buffer("the group of all ranks")
    attn_tp_buffer_mb: int | None = _own_buffer("attn_tp groups")
    attn_dp_buffer_mb: int | None = _own_buffer("attn_dp groups")
    embed_tp_buffer_mb: int | None = _own_buffer("embed_tp groups")
    lmhead_tp_buffer_mb: int | None = _own_buffer("lmhead_tp groups")

    def own_buffers(self, groups: Iterable[str]) -> list[tuple[str, int]]:
        """(key, MB) of those of `groups` that have a buffer size of their own."""
        keys = [f"{group}_buffer_mb" for group in groups]
        return [(key, size) for key in keys if (size := getattr(self, key)) is not None]
