"""Decides when the experts' rows are exchanged (ops/ascend/exchange.py) and not gathered, and the memory that this
takes.

Limits are those of the operators' tilings for Atlas A3, the same in OT 8.5.0, 9.0.0 and 9.1.0; Atlas A2 has others.
"""

from umbra.base.errors import UserError
from umbra.executor.config.units import MB
from umbra.executor.platform.ascend.hccl import A3
from umbra.executor.platform.ascend.settings import AscendSettings
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.config import ModelConfig
from umbra.ops.ascend.cann import since
from umbra.ops.parallel.partitions import ParallelSizes

EXCHANGE_SINCE = (8, 5)  # the oldest CANN whose sources are open
MOST_ROWS = 512  # of a rank in one step
LIMITS = {"ranks": (2, 768), "experts": (1, 1024), "experts a token": (1, 16), "columns": (1024, 8192)}
ONE_PLACE = ParallelSizes()  # each expert is on one rank


def why_gathered(settings: PlatformSettings, config: ModelConfig) -> str:
    """Returns why a case gathers the rows of all ranks on any device; empty if it may exchange them."""
    sizes = settings.sizes
    if not settings.of_device(AscendSettings).exchange:
        return "ascend_config.exchange: false"
    if sizes.attn_tp > 1 or sizes.moe_tp > 1:
        return "attn_tp_size and moe_tp_size are not both 1"
    values = sizes.world, sizes.physical(config.expert_count), config.experts_per_token, config.hidden_size
    for (what, (least, most)), value in zip(LIMITS.items(), values, strict=True):
        if not least <= value <= most:
            return f"{value} {what}, not {least} to {most}"
    return ""


def why_refused(soc: str, cann: str | None) -> str:
    """Returns why this device has no operators to exchange rows; empty if it has."""
    if not soc.startswith(A3):
        return f"{soc} is no Atlas A3"
    series = ".".join(map(str, EXCHANGE_SINCE))
    return "" if since(cann, EXCHANGE_SINCE) else f"needs CANN {series}, this is {cann or 'an unknown version'}"


def check_slots(settings: PlatformSettings, why: str) -> None:
    """Raises UserError if experts are to be placed by their use and rows are gathered, for the reason `why`."""
    if why and (own := settings.sizes.expert_slots):
        raise UserError(
            f"case {settings.case}: parallel_config.expert_slots: {own} needs rows that are exchanged, and "
            f"here they are gathered ({why}): leave it out"
        )


def most_rows(settings: PlatformSettings) -> int:
    """The largest step that is exchanged: a rank's whole batch, if the operators take it."""
    return min(settings.group_rows, MOST_ROWS)


def window_mb(rows: int, config: ModelConfig, sizes: ParallelSizes = ONE_PLACE) -> int:
    """The communicator's buffer for steps of `rows` rows on each rank. Every rank has room for rows of all ranks for
    each of its experts, and for the results of its own rows, all twice. One megabyte more holds what CANN 9.1 takes
    from it for each rank without counting it (OT 9.1.0, moe_distribute_check_win_size.h 175)."""
    row = 2 * config.hidden_size
    experts = sizes.physical(config.expert_count)
    sent = experts * _whole(_whole(row, 32) + 44, 512)  # a scale and three numbers behind each row
    back = config.experts_per_token * _whole(row, 512)
    return -(-2 * rows * (sent + back) // MB) + 1


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit
