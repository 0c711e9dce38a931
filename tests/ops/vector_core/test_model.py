"""The cycle model: its inputs, and that its times change as those of a machine would."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.vector_core_model import (
    BFLOAT16,
    HIGH,
    LOW,
    Machine,
    Phase,
    Shape,
    bank,
    count,
    fused,
    microseconds,
    pipes,
    predict,
)
from tests.fakes.ascend_c import Counts


@cache
def tiny(half_sums: bool = False) -> Counts:
    """128 rows of 64 columns: one task, which core 0 loads in one move."""
    (w,), (scales,) = bank(1, 128, 64, 32)
    inputs = dict(x=torch.ones(1, 128, dtype=BFLOAT16), w=w, scales=scales, zeros=None)
    return count("gemv_w4a16", inputs, half_sums)


def changed(**costs: Any) -> Machine:
    return replace(LOW, **costs)


def time(phases: list[Phase], **costs: Any) -> float:
    return sum(phase.time for phase in predict([phases], changed(**costs)))


@pytest.mark.slow
def test_counts_are_those_worked_out_by_hand() -> None:
    core, idle = tiny().cores[0][0], tiny().cores[1][0]
    assert core["mte2"]["by_move"] == {"256": 1, "512": 1, "4096": 1}  # x, scales (4, 64), nibbles
    assert core["repeats"]["Cast<half,int4b_t>"] == 128 * 64 // 128
    assert core["repeats"]["MulAddDst<float,half>"] == 128  # a row of 64 columns each
    assert not {"Mul<half>", "Add<half>"} & core["repeats"].keys()
    assert core["mte3"]["bytes"] == 128  # y (64)
    assert idle["mte2"]["by_move"] == {}
    assert idle["mte3"]["count"] == 0


def test_half_sums_cost_other_instructions_and_no_other_bytes() -> None:
    half, float_ = tiny(half_sums=True).cores[0][0], tiny().cores[0][0]
    assert half["repeats"]["Mul<half>"] == 128  # 64 columns leave half of a vector idle
    assert half["repeats"]["Add<half>"] == 64 + 32 + 16  # eight rows to a sum
    assert "MulAddDst<float,half>" not in half["repeats"]
    assert (half["mte2"], half["mte3"]) == (float_["mte2"], float_["mte3"])


def test_high_costs_more_than_low() -> None:
    assert microseconds(tiny(), HIGH) > microseconds(tiny(), LOW) > 0
    low, high = (pipes(tiny().cores[0][0], machine) for machine in (LOW, HIGH))
    assert all(high[pipe] >= low[pipe] for pipe in low)


def test_every_cost_counts() -> None:
    core = tiny().cores[0][0]
    for cost in ("barrier", "instruction", "conflict", "latency"):
        assert time([core], **{cost: 2 * getattr(LOW, cost)}) > time([core]), cost
    assert time([core, core], sync_all=9e5) - time([core, core], sync_all=0) == pytest.approx(9e5)  # one between two
    for pipe, cost in (("mte2", "move"), ("mte2", "piece"), ("scalar", "issue")):
        assert pipes(core, changed(**{cost: 1e4}))[pipe] > pipes(core, LOW)[pipe], cost
    mixture = fused(Shape("", 64, 32, 1)).cores[0][0]  # which reads its ids one by one
    assert pipes(mixture, changed(read=1e4))["scalar"] > pipes(mixture, LOW)["scalar"]


def test_bandwidth_helps_only_where_it_is_missing() -> None:
    core = tiny().cores[0][0]
    assert time([core], memory=2 * LOW.memory) == time([core])  # bound by the vector pipe
    size = core["mte2"]["bytes"] + core["mte3"]["bytes"]
    assert time([core], memory=0.01) == pytest.approx(size / 0.01 + LOW.latency)  # never faster than all bytes
    assert time([core], memory=0.02) < time([core], memory=0.01)
    assert time([core], core=0.01) > time([core], core=0.02) > time([core])


def test_a_barrier_more_takes_its_drain() -> None:
    core = copy.deepcopy(tiny().cores[0][0])
    before = time([core])
    core["barriers"]["V"] += 1
    assert time([core]) - before == pytest.approx(LOW.barrier / LOW.ghz)


def test_the_slowest_core_decides() -> None:
    fast, slow = tiny().cores[1], tiny().cores[0]
    [phase] = predict([fast, slow], LOW)
    assert phase.time == pytest.approx(time(slow))
    assert phase.time > time(fast)
    assert phase.bound == "vector"


def test_an_instruction_without_a_published_rate_is_refused() -> None:
    core = copy.deepcopy(tiny().cores[0][0])
    core["repeats"]["Gather<half>"] = 1
    with pytest.raises(KeyError, match="Gather"):
        pipes(core, LOW)
