"""Which cases and devices exchange the rows of experts, and why others gather them."""

import dataclasses
from typing import Any

import pytest

from executor.config.load import load_case, load_model_config
from executor.launch.platform_settings import platform_settings
from executor.platform.ascend.exchange import why_gathered, why_refused
from executor.platform.settings import PlatformSettings
from models.qwen3_moe.config import Qwen3MoeConfig

SPLIT = ("world_size=8", *(f"{name}_tp_size=1" for name in ("attn", "moe", "embed", "lmhead")), "batch_size=64")


def settings(*overrides: str) -> PlatformSettings:
    return platform_settings(load_case("qwen3_30b_a3b_bf16_tp8", [*SPLIT, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "sizes", "reason"),
    [
        ([], {}, ""),
        ([], dict(hidden_size=8192, num_experts=1024, num_experts_per_tok=16), ""),
        (["ascend_config.exchange=false"], {}, "ascend_config.exchange: false"),
        (["attn_tp_size=2"], {}, "attn_tp_size and moe_tp_size are not both 1"),
        (["moe_tp_size=2"], {}, "attn_tp_size and moe_tp_size are not both 1"),
        (["world_size=1"], {}, "1 ranks, not 2 to 768"),
        ([], dict(num_experts=0), "0 experts, not 1 to 1024"),
        ([], dict(num_experts=1032), "1032 experts, not 1 to 1024"),
        ([], dict(num_experts_per_tok=17), "17 experts a token, not 1 to 16"),
        ([], dict(hidden_size=1023), "1023 columns, not 1024 to 8192"),
        ([], dict(hidden_size=8193), "8193 columns, not 1024 to 8192"),
    ],
)
def test_cases(overrides: list[str], sizes: dict[str, Any], reason: str) -> None:
    model = load_model_config(load_case("qwen3_235b_a22b_bf16_tp16"))
    assert isinstance(model, Qwen3MoeConfig)
    assert why_gathered(settings(*overrides), dataclasses.replace(model, **sizes)) == reason


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
