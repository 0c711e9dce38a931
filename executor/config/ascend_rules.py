"""The rules between keys that only hold on, or only away from, platform: ascend; `config.check` calls them."""

import dataclasses
from typing import TYPE_CHECKING

from errors import UserError
from executor.platform.ascend.hccl import check_buffers

if TYPE_CHECKING:
    from executor.config.case import Case


def check_ascend(case: "Case", where: str) -> None:
    """What the fused kernels and HCCL take."""
    page_size, hccl, port = case.cache_config.page_size, case.hccl_config, case.ascend_config.base_port
    if page_size % 128 or page_size > 512:
        raise UserError(
            f"{where}: cache_config.page_size: {page_size} must be 128, 256, 384 or 512 on platform: ascend "
            "(blocks of paged attention)"
        )
    refused = [
        ("model_config.dtype", case.model_config.dtype, "float32", "choose bfloat16 or float16"),
        ("quantization.method", case.quantization.method, "q8", "choose q4 or none"),
    ]
    for name, value, without, instead in refused:
        if value == without:
            raise UserError(f"{where}: {name}: {value} has no fused kernels on platform: ascend: {instead}")
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
    if 0 < port < 1024:
        raise UserError(f"{where}: ascend_config.base_port: {port} is the system's: choose 1024 or more, or 0")
    if hccl.deterministic and hccl.aiv_group != "none":
        raise UserError(
            f"{where}: hccl_config.deterministic: true and hccl_config.aiv_group: {hccl.aiv_group} exclude each other "
            "(HCCL leaves the vector cores to be deterministic): set aiv_group: none"
        )
    check_buffers(case, where)


def check_not_ascend(case: "Case", where: str) -> None:
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
