"""The rules between the keys of a case that hold on platform: ascend."""

import itertools

from umbra.base.errors import UserError
from umbra.executor.config.case import Case
from umbra.executor.platform.ascend.facts import FACTS
from umbra.executor.platform.ascend.settings import AscendSettings, HcclSettings
from umbra.ops.parallel.partitions import names_sharing, partitions


def check(case: Case, where: str) -> None:
    """Refuse what the fused kernels, graphs and HCCL cannot do."""
    page_size, ascend, hccl = case.cache_config.page_size, case.of_device(AscendSettings), case.of_device(HcclSettings)
    if page_size != FACTS.page_size:
        raise UserError(
            f"{where}: cache_config.page_size: {page_size} must be {FACTS.page_size} on platform: ascend "
            "(the only block of paged attention that all versions of CANN document): leave it out"
        )
    if case.model_config.dtype == "float32":
        raise UserError(
            f"{where}: model_config.dtype: float32 has no fused kernels on platform: ascend: choose bfloat16 or float16"
        )
    if case.cache_config.kv_dtype != "auto":
        raise UserError(
            f"{where}: cache_config.kv_dtype: {case.cache_config.kv_dtype} is not supported on platform: ascend: "
            "leave it auto"
        )
    if case.model_config.enable_cache_compile and case.exe_mode == "eager":
        raise UserError(
            f"{where}: model_config.enable_cache_compile: true has nothing to keep with exe_mode: eager: choose a "
            "graph mode"
        )
    graphs = ("ge_graph", "acl_graph", "npugraph_ex")
    for name, modes in (("super_kernel", graphs[::2]), ("static_kernels", graphs[2:]), ("prefetch", graphs)):
        if getattr(ascend, name) and case.exe_mode not in modes:
            raise UserError(
                f"{where}: ascend_config.{name}: true has no meaning with exe_mode: {case.exe_mode}: choose "
                f"{' or '.join(modes)}, or leave it out"
            )
    if ascend.base_port is not None and ascend.base_port < 1024:
        raise UserError(
            f"{where}: ascend_config.base_port: {ascend.base_port} is the system's: choose 1024 or more, or 0"
        )
    if hccl.deterministic and hccl.aiv_group != "none":
        raise UserError(
            f"{where}: hccl_config.deterministic: true and hccl_config.aiv_group: {hccl.aiv_group} exclude each other "
            "(HCCL leaves the vector cores to be deterministic): set aiv_group: none"
        )
    if case.offload_config.mode != "none" and case.exe_mode == "ge_graph":
        raise UserError(
            f"{where}: offload_config.mode: {case.offload_config.mode} needs a callback to the host, which a GE graph "
            "takes from CANN 9 on, in an operator that Umbra does not have yet: choose exe_mode: acl_graph or "
            "npugraph_ex"
        )
    _check_buffers(case, hccl, where)


def _check_buffers(case: Case, hccl: HcclSettings, where: str) -> None:
    """Groups of the same ranks are one HCCL group, so they cannot have buffers of different sizes."""
    sizes = case.parallel_sizes
    for name, ranks in partitions(sizes).items():
        own = hccl.own_buffers(names_sharing(sizes, name))
        for (key, size), (other, other_size) in itertools.pairwise(own):
            if size != other_size:
                raise UserError(
                    f"{where}: hccl_config.{key}: {size} and hccl_config.{other}: {other_size}: both are the group "
                    f"of the same {len(ranks[0])} ranks: give them one size"
                )
