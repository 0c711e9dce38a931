"""L2: modelslim's int8 from its files to logits, in plain code under the real schemas: on one rank, on two, and with
experts on the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ascend.engine import GLM, M2, QWEN3, Family, in_int8, value_copies
from tests.ascend.on_cpu import ReferenceOnCpu, ascend_on_cpu
from tests.ascend.ranks import gloo_ranks, run_gloo_ranks
from tests.ascend.test_numerics import IDS, logits, save
from tests.ascend.test_shadow_numerics import FIVE, runner_of, used
from tests.ascend.workers import close_nodes
from umbra.commands.logits import collect_logits

BF16: dict[str, Any] = {"model_config": {"dtype": "bfloat16"}}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_nodes()


def save_int8(family: Family, folder: Path) -> None:
    save(in_int8(family), folder, inner=64, initializer_range=0.1)


def errors(ours: Any, expected: dict[str, np.ndarray], steps: str) -> list[float]:
    """Returns the errors of logits, relative to their norms."""
    compared = [name for name in expected if name.startswith(steps) and expected[name].size]
    return [float(np.linalg.norm(ours[n] - expected[n]) / np.linalg.norm(expected[n])) for n in compared]


@pytest.mark.parametrize("family", [QWEN3, M2, GLM], ids=str)
def test_logits_are_close_to_those_of_floats(tmp_path: Path, family: Family) -> None:
    save_int8(family, tmp_path)
    expected = logits(tmp_path, ReferenceOnCpu, model="model-floats")
    distances = errors(logits(tmp_path, ascend_on_cpu("fusion_v2"), **BF16), expected, "prefill")
    assert all(0.005 < error < 0.1 for error in distances), distances


def on_rank(rank: int, port: int, folder: Path, split: dict[str, int]) -> None:
    ranks, layout = gloo_ranks(rank, port, 2), BF16 | {"world_size": 2, "parallel_config": split}
    arrays: dict[str, Any] = logits(folder, ascend_on_cpu("fusion_v2"), ranks, **layout)
    np.savez(folder / f"rank{rank}.npz", **arrays)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "split", "steps"),
    [
        pytest.param(M2, {}, "prefill", id="tp", marks=pytest.mark.thorough),
        pytest.param(QWEN3, {"attn_tp_size": 1, "moe_tp_size": 1}, "", id="exchanged", marks=pytest.mark.thorough),
    ],
)
def test_two_ranks_equal_one(tmp_path: Path, family: Family, split: dict[str, int], steps: str) -> None:
    """Parts of rows, which tensor parallelism makes, have scales of their own, and so may choose another token."""
    save_int8(family, tmp_path)
    run_gloo_ranks(on_rank, 2, tmp_path, split)
    expected = logits(tmp_path, ascend_on_cpu("fusion_v2"), **BF16)
    for rank in range(2):
        with np.load(tmp_path / f"rank{rank}.npz") as ours:
            distances = errors(ours, expected, steps)
        assert max(distances) < 0.05, distances


def test_experts_on_the_cpu(tmp_path: Path) -> None:
    """The CPU rounds activations in a way of its own; what prompts miss is copied: the same products."""
    save_int8(QWEN3, tmp_path)
    expected = collect_logits(runner_of(tmp_path, **BF16), IDS, steps=5)
    runner = runner_of(tmp_path, offload_config=FIVE, **BF16)
    value_copies(runner, 0)
    ours = collect_logits(runner, IDS, steps=5)
    assert max(errors(ours, expected, "prefill")) == 0
    assert 0 < max(errors(ours, expected, "decode")) < 0.05
    assert used(runner)[1] > 0
