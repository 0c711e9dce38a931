"""Families with gated DeltaNet layers, compared with transformers, whatever the steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hybrid import ByHand, save_tiny_hybrid
from tests.tiny import oracle_logits

LENGTHS = 1, 2, 3, 4, 63, 64, 65, 130
IDS = [[(7 * i + 31 * length) % 319 + 1 for i in range(length)] for length in LENGTHS]
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_next", {}),
    ("qwen3_next", {"linear_num_value_heads": 6, "num_key_value_heads": 1, "linear_value_head_dim": 32}),
    ("qwen3_5_moe_text", {"linear_num_value_heads": 6, "num_key_value_heads": 1}),
    ("qwen3_5_moe", {"fused_experts": True, "linear_key_head_dim": 32}),
]
Steps = Iterator[dict[int, int]]


def at_once() -> Steps:
    yield dict(enumerate(LENGTHS))


def one_by_one() -> Steps:
    for s, length in enumerate(LENGTHS):
        yield from [{s: 1}] * length


def cut(*sizes: int) -> Steps:
    """Steps of all sequences, the longest first, of so many tokens in turn."""
    left, step = dict(enumerate(LENGTHS)), 0
    while left:
        order = sorted(left, reverse=True)
        counts = {s: min(left[s], sizes[(s + step) % len(sizes)]) for s in order}
        yield counts
        left, step = {s: left[s] - counts[s] for s in left if left[s] > counts[s]}, step + 1


def logits_in(model: ByHand, steps: Steps) -> list[Tensor]:
    found: list[list[Tensor]] = [[] for _ in LENGTHS]
    for counts in steps:
        for s, logits in model.step(counts).items():
            found[s].append(logits)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize(("kind", "options"), CONFIGS)
def test_logits_equal_transformers(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    oracle = save_tiny_hybrid(tmp_path / "model", kind, **options)
    found = logits_in(ByHand(tmp_path / "model", IDS), at_once())
    for logits, row in zip(found, IDS, strict=True):
        expected = oracle_logits(oracle, row)
        assert expected.std() > 0.5
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    for steps in (one_by_one(), cut(1, 2, 3, 5), cut(63, 1, 64), cut(16)):
        again = logits_in(ByHand(tmp_path / "model", IDS), steps)
        for logits, parts in zip(found, again, strict=True):
            assert torch.equal(logits, parts)
