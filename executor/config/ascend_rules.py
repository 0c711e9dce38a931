"""The rules between keys that hold on platform: ascend, and those about its keys on other platforms."""

import dataclasses
import itertools

from umbra.base.errors import UserError
from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS
from umbra.ops.parallel.partitions import names_sharing, partitions


def check_ascend(case: Case, where: str) -> None:
    """Refuse what the fused kernels and HCCL cannot do."""
    page_size, hccl, port = case.cache_config.page_size, case.hccl_config, case.ascend_config.base_port
    if page_size != PLATFORMS["ascend"].page_size:
        raise UserError(
            f"{where}: cache_config.page_size: {page_size} must be {PLATFORMS['ascend'].page_size} on platform: ascend "
            "(the only block of paged attention that all versions of CANN document): leave it out"
        )
    if case.model_config.dtype == "float32":
        raise UserError(
            f"{where}: model_config.dtype: float32 has no fused kernels on platform: ascend: choose bfloat16 or float16"
        )
    method, rest, kinds = case.quantization.method, case.quantization.rest, PLATFORMS[case.platform].quantised
    if method not in ("auto", "none", *kinds):
        raise UserError(
            f"{where}: quantization.method: {method} has no fused kernels on platform: ascend: choose q4 or none"
        )
    if rest not in ("none", *kinds):
        raise UserError(f"{where}: quantization.rest: {rest} has no fused kernels on platform: ascend: leave it out")
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
        if getattr(case.ascend_config, name) and case.exe_mode not in modes:
            raise UserError(
                f"{where}: ascend_config.{name}: true has no meaning with exe_mode: {case.exe_mode}: choose "
                f"{' or '.join(modes)}, or leave it out"
            )
    if port is not None and port < 1024:
        raise UserError(f"{where}: ascend_config.base_port: {port} is the system's: choose 1024 or more, or 0")
    if hccl.deterministic and hccl.aiv_group != "none":
        raise UserError(
            f"{where}: hccl_config.deterministic: true and hccl_config.aiv_group: {hccl.aiv_group} exclude each other "
            "(HCCL leaves the vector cores to be deterministic): set aiv_group: none"
        )
    _check_buffers(case, where)


def check_not_ascend(case: Case, where: str) -> None:
    """Refuse keys that only platform: ascend has a use for."""
    if case.model_config.enable_cache_compile:
        raise UserError(
            f"{where}: model_config.enable_cache_compile: true has nothing to keep on platform: {case.platform}"
        )
    for name in ("ascend_config", "hccl_config"):
        settings = getattr(case, name)
        for field in dataclasses.fields(settings):
            if getattr(settings, field.name) != field.default:
                raise UserError(
                    f"{where}: {name}.{field.name}: has no meaning on platform: {case.platform}: leave it out"
                )


def _check_buffers(case: Case, where: str) -> None:
    """Groups of the same ranks are one HCCL group, so they cannot have buffers of different sizes."""
    sizes = case.parallel_sizes
    for name, ranks in partitions(sizes).items():
        own = case.hccl_config.own_buffers(names_sharing(sizes, name))
        for (key, size), (other, other_size) in itertools.pairwise(own):
            if size != other_size:
                raise UserError(
                    f"{where}: hccl_config.{key}: {size} and hccl_config.{other}: {other_size}: both are the group "
                    f"of the same {len(ranks[0])} ranks: give them one size"
                )
