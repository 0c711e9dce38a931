"""The benchmarks' models of the vector cores: the cycle model beside published times, and the arithmetic of
vector_core_precision, which is that of the kernels, with what it costs a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.fakes.ascend_c import Counts
from tests.fakes.ascend_c.launch import launch
from umbra.executor.config.load import load_case, model_folder
from umbra.models.tokenizers import tokenizer_in
from umbra.ops.ascend.vector_core.planes import planes_of
from umbra.tools.benchmarks.vector_core_examples import WITHIN, Example, examples
from umbra.tools.benchmarks.vector_core_machine import HIGH, LOW, Phase, pipes, predict
from umbra.tools.benchmarks.vector_core_model import BFLOAT16, bank, count
from umbra.tools.benchmarks.vector_core_precision import TEXT, compare, in_runs

pytestmark = pytest.mark.slow


def gemv(columns: int, cores: int) -> Counts:
    w, scales = bank(planes_of(128, 32), columns)
    inputs = dict(x=torch.ones(1, 128, dtype=BFLOAT16), w=w, scales=scales, zeros=None)
    return count("gemv", inputs, (32,), cores)


@cache
def tiny() -> Counts:
    """128 rows of 64 columns: one plane, which one core loads in one move."""
    return gemv(64, 1)


@cache
def idle() -> list[dict[str, Any]]:
    """Core 0 of five that have four pairs of columns."""
    return gemv(8, 5).cores[0]


def time(phases: Sequence[Phase], **costs: Any) -> float:
    return sum(phase.time for phase in predict([phases], replace(LOW, **costs)))


def test_counts_are_those_worked_out_by_hand() -> None:
    (core,), (nothing,) = tiny().cores[0], idle()
    assert core["mte2"]["by_move"] == {"256": 1, "1024": 1, "4096": 1}  # x, scales (64, 8), nibbles
    assert core["repeats"]["Cast<half,int4b_t>"] == 128 * 64 // 128 + 1  # and the gap after a plane
    assert core["repeats"]["Mul<half>"] == 64  # a column each
    assert core["repeats"]["Add<half>"] == 2 * 64  # 128 lanes are folded twice: eight for each of four groups
    assert core["repeats"]["BlockReduceSum<float>"] == 64 + 8  # lanes of groups, groups
    assert "MulAddDst<float,half>" not in core["repeats"]
    assert core["mte3"]["bytes"] == 128  # y (64)
    assert nothing["mte2"]["by_move"] == {}
    assert nothing["mte3"]["count"] == 0


def test_the_slowest_core_decides() -> None:
    fast, slow = idle(), tiny().cores[0]
    [phase] = predict([fast, slow], LOW)
    assert phase.time == pytest.approx(time(slow))
    assert phase.time > time(fast)
    assert phase.bound == "vector"


def test_an_instruction_without_a_published_rate_is_refused() -> None:
    core = copy.deepcopy(tiny().cores[0][0])
    core["repeats"]["Gather<half>"] = 1
    with pytest.raises(KeyError, match="Gather"):
        pipes(core, LOW)


PUBLISHED = {example.name: example for example in examples()}


@pytest.mark.parametrize("example", PUBLISHED.values(), ids=PUBLISHED)
def test_published_times(example: Example) -> None:
    if not example.gives:
        assert (abs(example.error()) > WITHIN) == bool(example.misses)


@pytest.mark.parametrize(
    ("wrong", "noticed"),
    [
        ({"barrier": 60}, "seed: 8192 x 8192, batch 4"),
        ({"barrier": 0}, "seed: 8192 x 8192, batch 4"),
        ({"memory": 900}, "data_copy 5, all four times"),
        ({"l2_bytes": 1e12}, "Add case 4, two buffers"),
        ({"ghz": 1.0}, "vector pipe, Add case 4, 128 repeats"),
    ],
)
def test_wrong_constants_miss_published_times(wrong: dict[str, float], noticed: str) -> None:
    machines = (replace(machine, **wrong) for machine in (LOW, HIGH))  # type: ignore[arg-type]
    assert abs(PUBLISHED[noticed].error(*machines)) > WITHIN


def test_runs_are_those_of_the_kernel() -> None:
    """If runs cancel each other, the error of sums in half is far above that of rounding y, and is the same in both."""
    torch.manual_seed(0)
    k, n = 2048, 64
    planes = planes_of(k, 32)
    x = torch.empty(2, k)
    x[:, planes.order()] = 1 - 2 * (torch.arange(k) // planes.lanes // 8 % 2).float()
    x = (x + torch.randn(2, k) / 64).to(torch.float16)
    nibbles = torch.randint(4, 8, (n, k))
    scales = torch.full(planes.scales_shape(n), 0.01, dtype=torch.float16)
    y, _ = launch("gemv", x, planes.pack(nibbles).contiguous(), scales, None, attributes=(32,))
    sums = in_runs(x, nibbles, planes).sum(-1) * scales[0, 0, 0].float()
    exact = x.float() @ nibbles.float().T * scales[0, 0, 0].float()
    assert (y - exact).norm() > 0.003 * exact.norm()
    assert (y - sums).norm() < 0.2 * (y - exact).norm()


def test_sums_in_half_cost_little_beside_four_bits() -> None:
    """The demo model runs on 32 tokens. Its activations are not rounded here, so only sums differ."""
    case = load_case("demo", ["exe_mode=eager", "keep_packed=false", "dtype=float32"])
    divergences = compare(case, tokenizer_in(model_folder(case)).encode(TEXT.read_text(), chat=False)[:32])
    assert 0 < divergences.by_sums < 0.01 * divergences.by_bits
    assert divergences.by_order < 1e-4 * divergences.by_bits
    assert divergences.flips[1] <= divergences.flips[0] < 0.5
    assert set(divergences.ratios) == {"128 -> 768", "512 -> 128", "gate and up", "down"}
    assert all(0.001 < ratio < 0.02 for ratio in divergences.ratios.values())
