"""The ops of residual streams: native against their meaning, and Sinkhorn's against DeepSeek-V4's model."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from tests.ops.cpu.test_ops import SETS, start
from umbra.ops import reference
from umbra.ops.cpu import engine
from umbra.ops.cpu import ops as cpu
from umbra.ops.interface import SinkhornWeights


@pytest.mark.parametrize("instruction_set", SETS)
def test_native_ops_do_what_they_mean(instruction_set: str) -> None:
    torch.manual_seed(3)
    start((2,), instruction_set)
    for tokens, hidden in ((1, 40), (300, 72), (0, 8)):
        x, gates, y = torch.randn(tokens, 4 * hidden), torch.randn(tokens, 4 * hidden), torch.randn(tokens, hidden)
        products, weight = torch.randn(tokens, 12 + 4), torch.randn(4, hidden)
        low, logits = products[:, :12], products[:, 12:]
        mixing = SinkhornWeights(
            4, torch.randn(24, 4 * hidden), torch.randn(3), torch.randn(24), eps=1e-5, margin=1e-6, steps=2
        )
        calls: dict[str, tuple[Any, ...]] = {
            "spread": (y, 3),
            "stream_norm": (x, weight, 1e-5),
            "scaled_silu": (low, 0.25),
            "gated_read": (gates, x, 4),
            "gated_write": (x, y, logits),
            "sinkhorn_read": (x, mixing),
            "sinkhorn_write": (x, y, torch.randn(tokens, 4), torch.rand(tokens, 4, 4)),
        }
        for name, args in calls.items():
            once, again = ([a.clone() if a is x else a for a in args] for _ in range(2))
            actual, expected = getattr(cpu, name)(*once), getattr(reference, name)(*again)
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
            if name.endswith("write"):
                assert actual is once[0]  # in place
    engine.start(1, "auto")


@torch.no_grad()
def test_sinkhorn_is_that_of_deepseek_v4() -> None:
    torch.manual_seed(4)
    config = DeepseekV4Config(hidden_size=24, hc_mult=4, hc_sinkhorn_iters=2, rms_norm_eps=1e-5)
    oracle = DeepseekV4HyperConnection(config)
    for parameter in oracle.parameters():
        parameter.normal_()
    streams, y = torch.randn(5, 4 * 24), torch.randn(5, 24)
    post, comb, read = oracle(streams.view(1, 5, 4, 24))
    weights = SinkhornWeights(4, oracle.fn, oracle.scale, oracle.base, 1e-5, config.hc_eps, 2)
    implementations: list[Any] = [reference, cpu]
    for ops in implementations:
        own = ops.sinkhorn_read(streams, weights)
        for actual, expected in zip(own, (read[0], post[0], comb[0]), strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        mixed = post[0, :, :, None] * y[:, None] + comb[0].mT @ streams.view(5, 4, 24)
        written = ops.sinkhorn_write(streams.clone(), y, *own[1:])
        torch.testing.assert_close(written, mixed.flatten(1), atol=1e-5, rtol=1e-5)
