"""Which cases and devices exchange the rows of experts, and why others gather them."""

from types import SimpleNamespace
from typing import Any

import pytest

from executor.config.load import load_case
from executor.launch.platform_settings import platform_settings
from executor.platform.ascend.exchange import (
    why_gathered,
    why_refused,
)
from executor.platform.settings import PlatformSettings

QWEN3_235B = dict(hidden_size=4096, expert_count=128, experts_per_token=8)
SPLIT = ("world_size=8", *(f"{name}_tp_size=1" for name in ("attn", "moe", "embed", "lmhead")), "batch_size=64")


def settings(*overrides: str) -> PlatformSettings:
    return platform_settings(load_case("qwen3_30b_a3b_bf16_tp8", [*SPLIT, *overrides]))


def config(**sizes: int) -> Any:
    return SimpleNamespace(**QWEN3_235B | sizes)


@pytest.mark.parametrize(
    ("overrides", "sizes", "reason"),
    [
        ([], {}, ""),
        ([], dict(hidden_size=8192, expert_count=1024, experts_per_token=16), ""),
        (["ascend_config.exchange=false"], {}, "ascend_config.exchange: false"),
        (["attn_tp_size=2"], {}, "attn_tp_size and moe_tp_size are not both 1"),
        (["moe_tp_size=2"], {}, "attn_tp_size and moe_tp_size are not both 1"),
        (["world_size=1"], {}, "1 ranks, not 2 to 768"),
        ([], dict(expert_count=0), "0 experts, not 1 to 1024"),
        ([], dict(expert_count=1032), "1032 experts, not 1 to 1024"),
        ([], dict(experts_per_token=17), "17 experts a token, not 1 to 16"),
        ([], dict(hidden_size=1023), "1023 columns, not 1024 to 8192"),
        ([], dict(hidden_size=8193), "8193 columns, not 1024 to 8192"),
    ],
)
def test_cases(overrides: list[str], sizes: dict[str, int], reason: str) -> None:
    assert why_gathered(settings(*overrides), config(**sizes)) == reason


@pytest.mark.parametrize(
    ("soc", "cann", "reason"),
    [
        ("Ascend910_9391", "8.5.0", ""),
        ("Ascend910_9382", "9.1.0", ""),
        ("Ascend910B3", "9.1.0", "Ascend910B3 is no Atlas A3"),
        ("Ascend910_9391", "8.3.RC1", "needs CANN 8.5, this is 8.3.RC1"),
        ("Ascend910_9391", None, "needs CANN 8.5, this is an unknown version"),
    ],
)
def test_devices(soc: str, cann: str | None, reason: str) -> None:
    assert why_refused(soc, cann) == reason
