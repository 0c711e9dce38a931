"""The rules between the keys of a case that hold on platform: cuda."""

from umbra.base.errors import UserError
from umbra.executor.config.case import Case


def check(case: Case, where: str) -> None:
    """Refuse what the kernels and graphs cannot do."""
    if case.world_size > 1:
        raise UserError(
            f"{where}: world_size: {case.world_size}: platform: cuda runs on one GPU so far: set world_size: 1"
        )
    if case.cache_config.kv_dtype == "int8":
        raise UserError(f"{where}: cache_config.kv_dtype: int8 is not supported on platform: cuda: leave it auto")
