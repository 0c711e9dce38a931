"""The cycle model: its inputs, that its times change as those of a machine would, and published times beside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from ops.ascend.vector_core.planes import planes_of
from tests.fakes.ascend_c import Counts
from tools.benchmarks.vector_core_examples import WITHIN, Example, examples
from tools.benchmarks.vector_core_machine import HIGH, LOW, Machine, Phase, microseconds, pipes, predict
from tools.benchmarks.vector_core_model import BFLOAT16, Shape, bank, count, fused


def gemv(columns: int, cores: int, float_sums: bool = False) -> Counts:
    w, scales = bank(planes_of(128, 32), columns)
    inputs = dict(x=torch.ones(1, 128, dtype=BFLOAT16), w=w, scales=scales, zeros=None)
    return count("gemv", inputs, (32, float_sums), cores)


@cache
def tiny(float_sums: bool = False) -> Counts:
    """128 rows of 64 columns: one plane, which one core loads in one move."""
    return gemv(64, 1, float_sums)


@cache
def idle() -> Sequence[Phase]:
    """Core 0 of five that have four pairs of columns."""
    return gemv(8, 5).cores[0]


def changed(**costs: Any) -> Machine:
    return replace(LOW, **costs)


def time(phases: Sequence[Phase], **costs: Any) -> float:
    return sum(phase.time for phase in predict([phases], changed(**costs)))


@pytest.mark.slow
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


def test_float_sums_cost_other_instructions_and_no_other_bytes() -> None:
    (half,), (float_,) = tiny().cores[0], tiny(float_sums=True).cores[0]
    assert float_["repeats"]["Mul<half>"] == 64  # a column each
    assert float_["repeats"]["Axpy<float,half>"] == 2 * 64  # 64 lanes each
    assert not {"MulAddDst<float,half>", "Add<half>"} & float_["repeats"].keys()
    assert [half[way]["bytes"] for way in ("mte2", "mte3")] == [float_[way]["bytes"] for way in ("mte2", "mte3")]


def test_high_costs_more_than_low() -> None:
    assert microseconds(tiny().cores, HIGH) > microseconds(tiny().cores, LOW) > 0
    low, high = (pipes(tiny().cores[0][0], machine) for machine in (LOW, HIGH))
    assert all(high[pipe] >= low[pipe] for pipe in ("mte2", "mte3", "vector", "scalar"))


def test_every_cost_counts() -> None:
    core = tiny().cores[0][0]
    for cost in ("barrier", "latency"):
        assert time([core], **{cost: 2 * getattr(LOW, cost)}) > time([core]), cost
    assert time([core, core], wait=9e5) - time([core, core], wait=0) == pytest.approx(9e5)  # one between two
    changes = (("mte2", "move"), ("mte2", "piece"), ("scalar", "issue"), ("vector", "least"))
    for pipe, cost in changes:
        assert pipes(core, changed(**{cost: 1e4}))[pipe] > pipes(core, LOW)[pipe], cost
    mixture = fused(Shape("", 64, 32, 1)).cores[0][0]  # which reads its ids one by one
    assert pipes(mixture, changed(read=1e4))["scalar"] > pipes(mixture, LOW)["scalar"]


def test_an_instruction_takes_its_repeats_and_conflicts_but_three_cycles_at_least() -> None:
    core = copy.deepcopy(tiny().cores[0][0])
    core |= {"instructions": {"Add<half>": 10}, "repeats": {"Add<half>": 20}, "conflicts": {}, "barriers": {}}
    assert pipes(core, LOW)["vector"] == pytest.approx(30 / LOW.ghz)
    core["repeats"]["Add<half>"] = 40
    assert pipes(core, LOW)["vector"] == pytest.approx(40 / LOW.ghz)
    core["conflicts"]["Add<half>"] = 25
    assert pipes(core, LOW)["vector"] == pytest.approx(65 / LOW.ghz)
    assert pipes(core, LOW)["conflicts"] == pytest.approx(25 / LOW.ghz)


def test_loads_under_way_at_a_wait_hide_the_latency_of_the_next_phase() -> None:
    core = tiny().cores[0][0]
    assert time([core, core]) - time([core, {**core, "ahead": 1}]) == pytest.approx(LOW.latency)


def test_moves_that_are_waited_for_are_slower_the_smaller_they_are() -> None:
    sizes = (512, 1024, 3000, 8192, 9000, 22528, 1 << 20)
    speeds = [size / HIGH.move_time(size) for size in sizes]
    assert speeds == sorted(speeds)
    assert speeds[3] == pytest.approx(42.7 * 2**30 / 1e9)
    assert LOW.move_time(128) == LOW.move


def test_what_is_written_stays_in_the_cache_while_it_fits() -> None:
    assert LOW.memory_time(1e6, 1e6) == LOW.memory_time(1e6, 0)
    assert LOW.memory_time(2e8, 1e6) > LOW.memory_time(2e8, 0)
    assert LOW.memory_time(2e8, 1e6, bypass=True) == LOW.memory_time(2e8, 0)


def test_bandwidth_helps_only_where_it_is_missing() -> None:
    core = tiny().cores[0][0]
    assert time([core], memory=2 * LOW.memory) == time([core])  # bound by the vector pipe
    size = core["mte2"]["bytes"]
    assert time([core], memory=0.01) == pytest.approx(size / 0.01 + LOW.latency)  # never faster than all bytes read
    assert time([core], memory=0.02) < time([core], memory=0.01)
    assert time([core], core=0.01) > time([core], core=0.02) > time([core])


def test_a_barrier_more_takes_its_drain() -> None:
    core = copy.deepcopy(tiny().cores[0][0])
    before = time([core])
    core["barriers"]["V"] += 1
    assert time([core]) - before == pytest.approx(LOW.barrier / LOW.ghz)


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
