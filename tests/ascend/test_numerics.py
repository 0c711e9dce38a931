"""L2: the Ascend model code computes what the reference computes, in plain CPU code under the real `npu::` schemas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_npu
from torch import Tensor

from tests.ascend.engine import (
    DENSE_HYBRID,
    FLASH,
    GEMMA4,
    GLM,
    GPT_OSS,
    HY3,
    HYBRID,
    LLAMA,
    M2,
    MINISTRAL3,
    QWEN2,
    QWEN3,
    V2,
    V3,
    Family,
)
from tests.ascend.npu_on_cpu import dequantised
from tests.ascend.on_cpu import ReferenceOnCpu, ascend_on_cpu
from tests.ascend.ranks import gloo_ranks, run_gloo_ranks
from tests.families import ROWS
from tests.families.gemma4 import SHARED
from tests.modelslim import modelslim_tiny
from tests.quantised import mxfp4, mxfp4_tiny, quantise_tiny
from tests.tiny import ONE_RANK, tiny_case
from tests.variants import covering, thorough_after, thorough_but
from umbra.commands.logits import collect_logits
from umbra.executor.config.case import Case, ModelSettings, ParallelSettings
from umbra.executor.config.env import RankEnv
from umbra.executor.engine.step.rebalancing import Rebalancing
from umbra.executor.model_runner import make_runner
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.registry import family_in
from umbra.ops.ascend.cann import abilities
from umbra.ops.ascend.moe import ROUTINGS
from umbra.ops.ascend.weights import pack, quantise
from umbra.ops.formats import Format

IDS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(30, 53))]


def save(family: Family, folder: Path, inner: int = 32, **options: Any) -> None:
    family.save(folder / "model", **family.sizes | {"hidden_size": 64, ROWS[family.name].inner: inner} | options)


def logits(
    folder: Path, platform: Any, ranks: RankEnv = ONE_RANK, model: str = "model", **sections: Any
) -> dict[str, np.ndarray]:
    name = family_in(folder / model)
    case = tiny_case(
        folder,
        folder / model,
        model_name=name,
        cache_config={"page_size": 16},
        exe_mode="eager",
        data_config={"input_max_len": 32, "max_new_tokens": 8, "batch_size": 4},
        **sections,
    )
    runner = make_runner(case, folder, ranks)
    runner.setup(platform)
    return collect_logits(runner, IDS, steps=5)


def assert_same(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    for name, array in expected.items():
        if not name.startswith("ids"):
            assert array.std() > 0.5 or not array.size
            np.testing.assert_allclose(ours[name], array, atol=tolerance, err_msg=name)
    assert all(np.array_equal(ours[n], expected[n]) for n in expected if n.startswith("ids"))


@pytest.mark.parametrize(
    ("family_options", "routing"),
    covering(
        [
            (QWEN3, dict(attention_bias=True, mlp_only_layers=[1], norm_topk_prob=False)),
            (M2, {}),
            (QWEN2, {}),
            (GLM, dict(first_k_dense_replace=1)),
            (GLM, dict(use_qk_norm=False, norm_topk_prob=False)),
            (GPT_OSS, {}),
            (HYBRID, {}),
            (V3, {}),
            (V2, {}),
            (FLASH, dict(initializer_range=0.15)),
            (DENSE_HYBRID, {}),
            (LLAMA, dict(mlp_bias=True)),
            (MINISTRAL3, {}),
            (HY3, {}),
            (GEMMA4, {}),
            (GEMMA4, SHARED),
        ],
        list(ROUTINGS),
    ),
)
def test_model_equals_reference(tmp_path: Path, family_options: tuple[Family, dict[str, Any]], routing: str) -> None:
    family, options = family_options
    save(family, tmp_path, **options)
    assert_same(logits(tmp_path, ascend_on_cpu(routing)), logits(tmp_path, ReferenceOnCpu), 1e-4)


@pytest.mark.parametrize(("family", "cann"), [(QWEN3, "8.5.0"), (GPT_OSS, None)], ids=str)
def test_model_equals_reference_on_an_earlier_cann(tmp_path: Path, family: Family, cann: str | None) -> None:
    save(family, tmp_path)
    ours = logits(tmp_path, ascend_on_cpu("fusion_v2", can=abilities(cann)))
    assert_same(ours, logits(tmp_path, ReferenceOnCpu), 1e-4)


def test_counts_of_older_releases_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """op-plugin 7 counts the rows of 128 experts of 2,048 columns in int32."""
    newer = torch_npu.npu_moe_init_routing_v2

    def older(**given: Any) -> tuple[Tensor, ...]:
        rows, back, counts, scales = newer(**given)
        return rows, back, counts.int(), scales

    save(QWEN3, tmp_path)
    monkeypatch.setattr(torch_npu, "npu_moe_init_routing_v2", older)
    assert_same(logits(tmp_path, ascend_on_cpu("fusion_v2")), logits(tmp_path, ReferenceOnCpu), 1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("family", [M2, GPT_OSS], ids=str)
def test_bfloat16_stays_close(tmp_path: Path, family: Family) -> None:
    save(family, tmp_path, initializer_range=0.1)
    low: dict[str, Any] = {"model_config": {"dtype": "bfloat16"}}
    ours, expected = logits(tmp_path, ascend_on_cpu("fusion_v2"), **low), logits(tmp_path, ReferenceOnCpu)
    for name in ("prefill_0", "prefill_2"):
        error = np.abs(ours[name] - expected[name]).mean() / np.abs(expected[name]).mean()
        assert 1e-4 < error < 0.05, name


def rank_logits(rank: int, port: int, folder: Path, world_size: int, split: dict[str, int], routing: str) -> None:
    ranks = gloo_ranks(rank, port, world_size)
    arrays: dict[str, Any] = logits(folder, ascend_on_cpu(routing), ranks, world_size=world_size, parallel_config=split)
    np.savez(folder / f"rank{rank}.npz", **arrays)
    torch.distributed.destroy_process_group()


def exchanging_rank(rank: int, port: int, folder: Path) -> None:
    """Writes how often rows were exchanged, beside the logits."""
    combine, calls = torch_npu.npu_moe_distribute_combine_v2, []

    def counted(**given: Any) -> Tensor:
        calls.append(len(given["expert_ids"]))
        return combine(**given)

    torch_npu.npu_moe_distribute_combine_v2 = counted
    rank_logits(rank, port, folder, 2, {"attn_tp_size": 1, "moe_tp_size": 1}, "fusion_v2")
    np.save(folder / f"calls{rank}.npy", calls)


@pytest.mark.parametrize("family", thorough_but((M2, QWEN2, GPT_OSS), M2), ids=str)
def test_exchanged_rows_equal_the_reference(tmp_path: Path, family: Family) -> None:
    """In every layer of every decode step, of which there are five, and in no prefill, whose groups differ."""
    save(family, tmp_path)
    run_gloo_ranks(exchanging_rank, 2, tmp_path)
    assert_ranks(tmp_path, 2)
    for rank in range(2):
        assert len(np.load(tmp_path / f"calls{rank}.npy")) == 2 * 5


def placing_rank(rank: int, port: int, folder: Path, ranks: int, slots: int, still: bool) -> None:
    """As above, with experts in slots; `still`: weights are not moved."""
    if still:
        Rebalancing._move = lambda *_: 0  # type: ignore[method-assign]
    split = {"attn_tp_size": 1, "moe_tp_size": 1, "expert_slots": slots, "rebalance_steps": 1}
    rank_logits(rank, port, folder, ranks, split, "fusion_v2")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "ranks", "slots"),
    [(QWEN3, 2, 5), (GPT_OSS, 4, 3)],  # with biases
    ids=str,
)
def test_placed_experts_equal_the_reference(tmp_path: Path, family: Family, ranks: int, slots: int) -> None:
    """While experts move, in exchanged decode steps and in a prefill whose rows are gathered."""
    save(family, tmp_path)
    run_gloo_ranks(placing_rank, ranks, tmp_path, ranks, slots, False)
    assert_ranks(tmp_path, ranks)
    run_gloo_ranks(placing_rank, ranks, tmp_path, ranks, slots, True)
    with pytest.raises(AssertionError, match="decode"):
        assert_ranks(tmp_path, ranks)


TWO_RANKS: dict[str, dict[str, int]] = {"tp2": {}, "ep2": {"moe_tp_size": 1}, "dp2": {"attn_tp_size": 1}}


@pytest.mark.parametrize(
    ("family", "split", "routing"),
    thorough_after(
        1,
        [
            (M2, "tp2", "fusion_v2"),
            (QWEN3, "ep2", "tp"),
            (QWEN3, "dp2", "fusion_v1"),
            (QWEN2, "dp2", "fusion_v2"),
            (GLM, "tp2", "fusion_v2"),
            (GPT_OSS, "tp2", "fusion_v2"),
            (GPT_OSS, "dp2", "fusion_v1"),
            (HYBRID, "tp2", "fusion_v2"),
            (HYBRID, "dp2", "fusion_v2"),
            (V3, "tp2", "fusion_v2"),
            (V3, "dp2", "fusion_v2"),
        ],
    ),
    ids=str,
)
def test_two_ranks_equal_the_reference(tmp_path: Path, family: Family, split: str, routing: str) -> None:
    save(family, tmp_path)
    check_ranks(tmp_path, 2, TWO_RANKS[split], routing)


@pytest.mark.thorough
@pytest.mark.parametrize("split", [{"moe_tp_size": 2}, {"sequence_parallel_tokens": 1}], ids=["ep2tp2", "tp4_sp"])
def test_ranks_with_copies_of_a_head_equal_the_reference(tmp_path: Path, split: dict[str, int]) -> None:
    """Two ranks hold each KV head, and its part of the weight of the norm over all heads."""
    save(M2, tmp_path)
    check_ranks(tmp_path, 4, split, "fusion_v2")


def check_ranks(folder: Path, world_size: int, split: dict[str, int], routing: str) -> None:
    run_gloo_ranks(rank_logits, world_size, folder, world_size, split, routing)
    assert_ranks(folder, world_size)


def assert_ranks(folder: Path, world_size: int) -> None:
    expected = logits(folder, ReferenceOnCpu)
    for rank in range(world_size):
        with np.load(folder / f"rank{rank}.npz") as arrays:
            assert_same(dict(arrays), expected, 1e-4)


@pytest.mark.parametrize(
    ("format", "group", "symmetric"),
    [("awq", 32, False), ("gptq", 32, True), ("pack-quantized", 64, True), ("fp8", 0, True), ("desc_act", 32, False)],
)
def test_a_quantised_checkpoint_equals_its_floats(tmp_path: Path, format: str, group: int, symmetric: bool) -> None:
    """4-bit checkpoints keep their levels in the NPU's layout, so the weights are equal to the last bit. FP8 and
    activation order become floats, as `auto` means on Ascend; the CPU, which this case names, has other formats."""
    save(QWEN3, tmp_path, inner=64)
    quantise_tiny(tmp_path / "model", tmp_path / "quantised", format, group, 4, symmetric)
    method: dict[str, Any] = {"quantization": {"method": "none" if format in ("fp8", "desc_act") else "auto"}}
    ours = logits(tmp_path, ascend_on_cpu("fusion_v2"), model="quantised", **method)
    assert_same(ours, logits(tmp_path, ReferenceOnCpu, model="quantised-floats"), 1e-4)


def test_modelslim_with_biases_is_near_its_floats(tmp_path: Path) -> None:
    """Norms and static attention have biases; in int8 rows are rounded by token."""
    save(QWEN3, tmp_path, inner=64)
    kinds = lambda module: "W8A8_DYNAMIC" if ".mlp." in module else "W8A8"  # noqa: E731
    floats = modelslim_tiny(tmp_path / "model", tmp_path / "quantised", kinds, moved=True)
    expected = logits(tmp_path, ReferenceOnCpu, model=floats.name)["prefill_0"]
    for method, dtype, most in (("none", "float32", 1e-3), ("auto", "bfloat16", 0.1)):
        how: dict[str, Any] = {"quantization": {"method": method}, "model_config": {"dtype": dtype}}
        ours = logits(tmp_path, ascend_on_cpu("fusion_v2"), model="quantised", **how)["prefill_0"]
        assert np.abs(ours - expected).mean() < most * np.abs(expected).mean(), method


def test_mxfp4_is_exact_in_floats(tmp_path: Path) -> None:
    """Floats are the choice of `auto` on Ascend. They are exact in bfloat16 too, which has each value of a block."""
    save(GPT_OSS, tmp_path, inner=64)
    floats = mxfp4_tiny(tmp_path / "model", tmp_path / "quantised")
    for dtype in ("float32", "bfloat16"):
        more: dict[str, Any] = {"quantization": {"method": "none"}, "model_config": {"dtype": dtype}}
        ours, expected = (
            logits(tmp_path, ascend_on_cpu("fusion_v2"), model=name, **more) for name in ("quantised", floats.name)
        )
        assert_same(ours, expected, 0)


@pytest.mark.parametrize(("zeros", "error"), [(False, 0.07), (True, 0.08)])
def test_mxfp4_rounded_again(zeros: bool, error: float) -> None:
    """As executor/engine/step/weights.py says."""
    _, (weight,) = mxfp4(torch.randn(1, 256, 512))
    nibbles, scale, offset = quantise(weight, 32, zeros)
    back = (nibbles.unflatten(1, (-1, 32)) + offset[..., None]) * scale[..., None]
    assert float((back.flatten(1) - weight).norm() / weight.norm()) == pytest.approx(error, abs=0.005)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64])
def test_four_bits_come_back(group: int, zeros: bool) -> None:
    """The plain implementation unpacks packed weights with an error of half a step at most, or a whole one at the end
    of the range where there is no value for it."""
    weight = torch.randn(24, 128) + 0.3
    nibbles, scale, offset = quantise(weight, group, zeros)
    assert nibbles.min() >= -8
    assert nibbles.max() <= 7
    back = dequantised(pack(nibbles.T), scale.T, offset.T if zeros else None).T
    steps = (back - weight).abs().unflatten(1, (-1, group)).amax(-1) / scale.abs()
    assert steps.max() < 1.01  # a rounded zero point moves the ends by up to half a step more
    assert steps.median() < 0.51
    assert len(nibbles.unique()) == 16


def tiny_stub() -> PlatformSettings:
    return platform_settings(
        Case(model_config=ModelSettings(dtype="float32"), parallel_config=ParallelSettings(attn_tp_size=1))
    )


@pytest.mark.parametrize("routing", ROUTINGS)
def test_nothing_resident_adds_nothing(routing: str) -> None:
    ops: Any = ascend_on_cpu(routing)(tiny_stub(), ONE_RANK).ops
    experts = ops.expert_matrices(2, 32, 64, Format("float32"), torch.device("cpu"))
    for e in range(2):
        for which, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
            experts.fill(e, which, torch.randn(shape))
    ids = torch.tensor([[0, -1], [5, 1]], dtype=torch.int32)
    out = ops.moe(torch.randn(2, 64), torch.rand(2, 2), ids, experts, 2)
    assert not out.any()
