"""Experts on the CPU beside the Ascend model code, which runs in plain CPU code under the real schemas."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.ascend.engine import GLM, GPT_OSS, HYBRID, M2, QWEN2, QWEN3, V2, V3, Family, value_copies
from tests.ascend.on_cpu import ascend_on_cpu
from tests.ascend.ranks import gloo_ranks, run_gloo_ranks
from tests.ascend.test_numerics import IDS, save
from tests.ascend.umbra_on_cpu import CALLS
from tests.ascend.workers import close_nodes
from tests.quantised import quantise_tiny
from tests.tiny import ONE_RANK, tiny_case
from tests.variants import thorough_after
from umbra.commands.logits import collect_logits
from umbra.executor.config.env import RankEnv
from umbra.executor.model_runner import ModelRunner, make_runner
from umbra.executor.platform.ascend import long_steps
from umbra.executor.platform.ascend.shadow_device import AscendDevice
from umbra.ops.ascend.shadow import ShadowNodes
from umbra.ops.ascend.vector_core import blocks

WIDE: dict[str, Any] = {"hidden_size": 128, "inner": 64}
ELASTIC: dict[str, Any] = {"mode": "elastic", "arena_mb": 400 / 1024}
FIVE: dict[str, Any] = {"mode": "fixed", "slots": 5}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_nodes()


def runner_of(
    folder: Path,
    model: str = "model",
    gemv_tokens: int = 0,
    ranks: RankEnv = ONE_RANK,
    routing: str = "fusion_v2",
    **sections: Any,
) -> ModelRunner:
    case = tiny_case(
        folder,
        folder / model,
        cache_config={"page_size": 16},
        exe_mode="eager",
        data_config={"input_max_len": 32, "max_new_tokens": 8, "batch_size": 4},
        **sections,
    )
    runner = make_runner(case, folder, ranks)
    runner.setup(ascend_on_cpu(routing, gemv_tokens))
    return runner


def used(runner: ModelRunner) -> tuple[int, int]:
    """The number of pairs of a token and an expert that reached the host, and of those that it computed. Residents do
    not change in these tests."""
    assert runner.engine.shadows
    counts = runner.engine.shadows.counts
    return int(counts.sum()), int(counts[~runner.engine.shadows.published].sum())


@pytest.mark.parametrize(
    ("family", "offload"),
    [
        (QWEN3, ELASTIC),
        (QWEN3, {"mode": "fixed", "slots": -1}),
        (M2, FIVE),
        (QWEN3, {"mode": "resident"}),
        (QWEN2, FIVE),
        (GLM, FIVE),
        (GPT_OSS, FIVE),
        (HYBRID, FIVE),
        (V3, FIVE),
        (V2, {"mode": "elastic", "arena_mb": 2}),
    ],
    ids=[
        "elastic",
        "none",
        "5",
        "all",
        "5 and a gated shared one",
        "5 and a shared one",
        "5 with biases",
        "5 and states",
        "5 in groups",
        "elastic, beside latents",
    ],
)
def test_logits_are_those_without(tmp_path: Path, offload: dict[str, Any], family: Family) -> None:
    save(family, tmp_path, **WIDE)
    expected = collect_logits(runner_of(tmp_path, model_name=family.name), IDS, steps=5)
    runner = runner_of(tmp_path, model_name=family.name, offload_config=offload)
    value_copies(runner, 0)
    ours = collect_logits(runner, IDS, steps=5)
    for name, array in expected.items():
        if name.startswith("prefill"):  # copied: the same products of the same weights
            np.testing.assert_array_equal(ours[name], array, err_msg=name)
        else:
            np.testing.assert_allclose(ours[name], array, atol=1e-4, err_msg=name)
    told, missed = used(runner)
    assert told == 2 * 3 * (sum(map(len, IDS)) + 3 * 5)  # layers, experts a token, steps: padding is not counted
    assert missed == {"resident": 0}.get(offload["mode"], missed)
    assert missed > 0 or offload["mode"] == "resident"


@pytest.mark.parametrize(
    ("copy", "routing"), thorough_after(2, [(1.1, "fusion_v2"), (99, "fusion_v2"), (1.3, "tp"), (1.3, "fusion_v1")])
)
def test_prefills_are_the_same_however_they_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: float, routing: str
) -> None:
    monkeypatch.setattr(long_steps, "group_size", lambda *_: 2)
    monkeypatch.setattr(long_steps, "JOB_ROWS", 9)
    save(QWEN3, tmp_path, **WIDE)
    expected = collect_logits(runner_of(tmp_path), IDS, steps=1)
    runner = runner_of(tmp_path, offload_config=FIVE, routing=routing)
    ring = value_copies(runner, copy)
    ours = collect_logits(runner, IDS, steps=1)
    for name, array in expected.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-4, err_msg=name)
    assert ring.copied.sum() in ({0} if copy == 99 else range(1, 11))


def test_large_banks_are_made_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight experts are gathered in three parts, for prompts and for steps of more pairs than a part has experts."""
    save(QWEN3, tmp_path, **WIDE)
    expected = collect_logits(runner_of(tmp_path), IDS, steps=5)
    monkeypatch.setattr(blocks, "LARGEST_BANK", 3 * 3 * 128 * 64 * 4)
    runner = runner_of(tmp_path, offload_config=FIVE)
    ours = collect_logits(runner, IDS, steps=5)
    assert runner.engine.shadows
    device = cast(AscendDevice, runner.engine.shadows.device)
    assert sorted(device.slots.indices) == [2, 3, 8]  # and those of residents for prompts
    for name, array in expected.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(("offload", "gemv_tokens"), [(ELASTIC, 0), (FIVE, 8)], ids=["elastic", "5 slots"])
def test_four_bits_stay_close(tmp_path: Path, offload: dict[str, Any], gemv_tokens: int) -> None:
    """The host's kernels round activations to 8 bits; the weights are the same."""
    save(QWEN3, tmp_path, **WIDE)
    quantise_tiny(tmp_path / "model", tmp_path / "quantised", "awq", 32, 4, symmetric=False)
    expected = collect_logits(runner_of(tmp_path, "quantised", gemv_tokens), IDS, steps=5)
    CALLS.clear()
    runner = runner_of(tmp_path, "quantised", gemv_tokens, offload_config=offload)
    value_copies(runner, 0)
    ours = collect_logits(runner, IDS, steps=5)
    for name, array in expected.items():
        if not name.startswith("ids") and array.size:
            error = np.abs(ours[name] - array).mean() / np.abs(array).mean()
            assert error < 0.03, name
            assert (error == 0) == name.startswith("prefill"), name
    assert CALLS["fused_moe_slots_w4a16"] == (2 * 5 if gemv_tokens else 0)
    assert used(runner)[1] > 0


@pytest.mark.parametrize(("family", "gemv_tokens"), [(QWEN3, 0), (M2, 8)])
def test_floats_are_quantised_alike_with_shadows(tmp_path: Path, family: Family, gemv_tokens: int) -> None:
    save(family, tmp_path, **WIDE)
    how = {"method": "q4", "zero_points": gemv_tokens > 0}
    sections: dict[str, Any] = {"model_name": family.name, "quantization": how}
    expected = collect_logits(runner_of(tmp_path, "model", gemv_tokens, **sections), IDS, steps=5)
    CALLS.clear()
    runner = runner_of(tmp_path, "model", gemv_tokens, **sections, offload_config=FIVE)
    value_copies(runner, 0)
    ours = collect_logits(runner, IDS, steps=5)
    for name, array in expected.items():
        if not name.startswith("ids") and array.size:
            errors = np.abs(ours[name] - array).mean(-1) / np.abs(array).mean()
            assert np.median(errors) < 0.05, name  # a rounding may choose another token, from which on all differs
    assert CALLS["fused_moe_slots_w4a16"] == (2 * 5 if gemv_tokens else 0)
    assert used(runner)[1] > 0


@pytest.mark.parametrize(("gemv_tokens", "experts"), [(0, 8), (0, 32), (8, 8)], ids=["all", "by pair", "one kernel"])
def test_each_pair_is_computed_once_whenever_experts_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gemv_tokens: int, experts: int
) -> None:
    """All experts are in slots; whether the device's table says so changes before and after each look at it."""
    save(QWEN3, tmp_path, num_experts=experts, **WIDE)
    quantise_tiny(tmp_path / "model", tmp_path / "quantised", "awq", 32, 4, symmetric=False)
    model = "quantised" if gemv_tokens else "model"
    expected = collect_logits(runner_of(tmp_path, model, gemv_tokens), IDS, steps=8)
    runner = runner_of(tmp_path, model, gemv_tokens, offload_config={"mode": "resident"})
    value_copies(runner, 0)
    assert runner.engine.shadows
    shadows, device = runner.engine.shadows, cast(AscendDevice, runner.engine.shadows.device)
    submit, chance = ShadowNodes.submit, np.random.default_rng(1)

    def turn() -> None:
        arrived = torch.from_numpy(chance.random(device.on_host.shape) < 0.5)
        device.on_device.copy_(torch.where(arrived, device.on_host, -device.slots.nowhere))

    def turned(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        turn()
        submitted = submit(*given)
        turn()
        return submitted

    monkeypatch.setattr(ShadowNodes, "submit", turned)
    ours = collect_logits(runner, IDS, steps=8)
    for name, array in expected.items():
        if not name.startswith("ids") and array.size:
            error = np.abs(ours[name] - array).mean() / np.abs(array).mean()
            assert error < (0.03 if gemv_tokens else 1e-5), name
    assert 0.3 < shadows.hits.sum() / (2 * 3 * 3 * 8) < 0.7  # layers, sequences, experts of a token, decode steps


def rank_logits(rank: int, port: int, folder: Path, split: dict[str, int], gemv_tokens: int) -> None:
    ranks = gloo_ranks(rank, port, 2)
    sections: dict[str, Any] = dict(world_size=2, parallel_config=split, offload_config=FIVE)
    runner = runner_of(folder, "quantised" if gemv_tokens else "model", gemv_tokens, ranks, **sections)
    value_copies(runner, 0)
    arrays: dict[str, Any] = collect_logits(runner, IDS, steps=5)
    np.savez(folder / f"rank{rank}.npz", used=used(runner), calls=CALLS["fused_moe_slots_w4a16"], **arrays)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("split", "gemv_tokens"),
    thorough_after(1, [({"moe_tp_size": 1}, 0), ({"attn_tp_size": 1}, 0), ({}, 8)]),
    ids=["ep2", "dp2", "tp2-q4"],
)
def test_two_ranks(tmp_path: Path, split: dict[str, int], gemv_tokens: int) -> None:
    """Each rank keeps shadows of its own part of the experts; floats, then four bits."""
    save(QWEN3, tmp_path, **WIDE)
    if gemv_tokens:
        quantise_tiny(tmp_path / "model", tmp_path / "quantised", "awq", 32, 4, symmetric=False)
    run_gloo_ranks(rank_logits, 2, tmp_path, split, gemv_tokens)
    expected = collect_logits(runner_of(tmp_path, "quantised" if gemv_tokens else "model"), IDS, steps=5)
    told, tokens = 0, sum(map(len, IDS)) + 3 * 5
    for rank in range(2):
        with np.load(tmp_path / f"rank{rank}.npz") as arrays:
            for name, array in expected.items():
                if name.startswith("ids") or not array.size:
                    continue
                error = np.abs(arrays[name] - array).mean() / np.abs(array).mean() if arrays[name].size else 0
                assert error < (0.03 if gemv_tokens else 1e-5), name
            assert arrays["used"][1] > 0
            told += arrays["used"][0]
            assert (arrays["calls"] > 0) == (gemv_tokens > 0 and "attn_tp_size" not in split)
    assert told == 2 * 3 * tokens * (1 if "moe_tp_size" in split else 2)
