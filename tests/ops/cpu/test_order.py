"""How pool, tape, shadow experts, copier and bridge synchronise, in every order that the memory model of C++ allows."""

import re

import pytest

from tests.ops.cpu.native.ordering import PROGRAMS, explore, weakened

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SCENARIO = re.compile(r"^(.*): (\d+) executions, (\d+) cut short(.*)$", re.MULTILINE)
OUTCOMES = {  # of the machine itself; what C++ forbids is missing
    "store buffers, relaxed": {0, 1, 10, 11},
    "store buffers, release and acquire": {0, 1, 10, 11},
    "store buffers, seq_cst": {1, 10, 11},
    "message, relaxed": {0, 1, 10, 11},
    "message, release alone": {0, 1, 10, 11},
    "message, release and acquire": {0, 1, 11},
    "two writers": {11, 12, 21, 22},
    "release sequence": {0, 1, 2, 3},
    "counted": {0, 1},
}


def test_the_machine_has_the_outcomes_of_the_memory_model() -> None:
    found = {
        name: set(map(int, re.findall(r"\| (\d+):", rest))) for name, _, _, rest in SCENARIO.findall(explore("litmus"))
    }
    assert {name: found[name] for name in OUTCOMES} == OUTCOMES
    assert 1010 in found["four threads, release and acquire"]
    assert 1010 not in found["four threads, seq_cst"]
    assert len(found["four threads, seq_cst"]) == 15


def test_reduction_loses_no_outcome() -> None:
    assert explore("litmus", "--random", "40") == "40 programs\n"


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "litmus"])
def test_every_order_is_right(program: str) -> None:
    printed = explore(program)
    assert "not all" not in printed
    assert all(int(count) > 0 for _, count, _, _ in SCENARIO.findall(printed))


def test_each_memory_order_of_the_pool_is_needed() -> None:
    found = weakened("pool", "--most", "6000")
    assert len(found) > 20
    assert [one for one in found if one[2].startswith("not")] == []
