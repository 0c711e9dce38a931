"""Mistakes that implementations of dense decoders have made, as patches of Umbra."""

from typing import Any

import pytest
import torch

from tests.models.family_mistakes import Mistake, attending
from umbra.models.layers import rotary
from umbra.models.layers.attention import GroupedAttention
from umbra.models.rope import Llama3Config, RopeConfig


def plain_rope(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RopeConfig, "inverse_frequencies", lambda self: self.plain_frequencies)


def llama3_with(**changes: Any) -> Mistake:
    def mistake(patch: pytest.MonkeyPatch) -> None:
        names = "factor", "original_length", "low_freq_factor", "high_freq_factor"
        changed = lambda *values: Llama3Config(**(dict(zip(names, values, strict=True)) | changes))  # noqa: E731
        patch.setattr("umbra.models.rope.Llama3Config", changed)

    return mistake


def growing(scales: Any) -> Mistake:
    """`scales` takes positions, the original length and beta."""

    def query_scales(config: RopeConfig, positions: int) -> torch.Tensor:
        assert config.yarn
        factors: torch.Tensor = scales(torch.arange(positions).float(), config.yarn.original_length, config.query_beta)
        return factors

    return lambda patch: patch.setattr(rotary, "query_scales", query_scales)


def keys_grow_too(patch: pytest.MonkeyPatch) -> None:
    attend: Any = GroupedAttention._attend

    def grown(self: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Any) -> Any:
        if self.query_rotary:
            cos, sin = self.query_rotary(batch.positions)
        return attend(self, qkv, cos, sin, batch)

    patch.setattr(GroupedAttention, "_attend", grown)


LLAMA: dict[str, Mistake] = {"plain_rope": plain_rope, "another_original_length": llama3_with(original_length=64)}
LLAMA |= {"factor_for_all": llama3_with(low_freq_factor=30.0, high_freq_factor=31.0)}
MISTRAL: dict[str, Mistake] = {"a_wider_window": attending(lambda window, sinks: (window and window + 1, sinks))}
MISTRAL |= {"no_window": attending(lambda window, sinks: (None, sinks))}
MINISTRAL3: dict[str, Mistake] = {
    "queries_do_not_grow": growing(lambda at, length, beta: torch.ones_like(at)),
    "without_floor": growing(lambda at, length, beta: 1 + beta * (at / length).log1p()),
    "keys_grow_too": keys_grow_too,
    "plain_rope": plain_rope,
}
