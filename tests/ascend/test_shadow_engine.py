"""Cases with shadow experts on the fake device: what a step asks of it, what moves between steps, what goes wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cpu_offload.ascend import AscendDevice
from cpu_offload.offload import Offload
from executor import offloading
from executor.model_runner import ModelRunner
from tests.ascend.engine import ascend_case, ascend_runner, prefilled
from tests.ascend.log import device_log, violations
from tests.ascend.test_eager import ATTENTION, EXPERTS, FINALIZE, MOE, ROUTER

SLOT = 3 * 128 * 64 * 2  # bytes
FORK = ["memcpy async D2H 768", "memcpy async D2H 36", "memcpy async D2H 18", "host function", "memcpy async H2D 768"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`arena_mb` counts kilobytes: the model is tiny."""
    monkeypatch.setattr(offloading, "MB", 1 << 10)
    torch._dynamo.reset()
    yield
    assert not violations()


def runner_of(folder: Path, *overrides: str, mode: str = "fixed") -> ModelRunner:
    case = ascend_case(folder, f"offload_config.mode={mode}", "strict=true", *overrides)
    return ascend_runner(case, folder)


def parts(runner: ModelRunner) -> tuple[Offload, AscendDevice]:
    assert runner.offload
    assert isinstance(runner.offload.device, AscendDevice)
    return runner.offload, runner.offload.device


def step_log(runner: ModelRunner, running: list[Any]) -> list[str]:
    with device_log() as log:
        runner._decode(running)
    return log.lines


def bank(experts: int, arena: int) -> list[str]:
    """Gathers residents out of their slots in an arena of so many rows; who is missing is zeros."""
    rows = experts * SLOT // 512
    return [
        f"aclnnIndexSelect ({experts})int32 ({rows})int32 ({rows})int32",
        f"aclnnAdd ({rows})int32 ({rows})int32 scalar:int64 ({rows})int32",
        f"aclnnIndexSelect ({arena},128)int32 ({rows})int32 ({rows},128)int32",
    ]


JOIN = "aclnnAdd (3,128)bfloat16 (3,128)bfloat16 scalar:int64 (3,128)bfloat16"


def untiled(line: str) -> str:
    return line.replace("WeightNz", "V5").replace(":NZ", "")


def test_a_layer(tmp_path: Path) -> None:
    """Between fork and join the main stream has the residents' part and no wait; slots hold no tiles (NZ)."""
    runner = runner_of(tmp_path, "exe_mode=eager", "slots=5")
    lines = step_log(runner, prefilled(runner))
    start = lines.index(ROUTER[-1]) + 1
    own = [*bank(8, 1920), MOE["fusion_v2"][0], *map(untiled, EXPERTS), FINALIZE]
    expected = [*FORK, *own, JOIN, ATTENTION[-1]]
    assert lines[start : start + len(expected)] == expected


def test_few_pairs_are_a_bank_each(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "exe_mode=eager", "slots=5")
    lines = step_log(runner, prefilled(runner, [[5, 17, 3]]))
    (start,) = (i for i, line in enumerate(lines[:40]) if line == "host function")
    assert lines[start + 2 : start + 6] == ["aclnnIndexSelect (8)int32 (3)int32 (3)int32", *bank(3, 1920)]


def test_a_long_prefill_streams_what_is_missing(tmp_path: Path) -> None:
    """Three of eight are resident in one layer, two in the other; each of the others comes in two planes."""
    runner = runner_of(tmp_path, "exe_mode=eager", "slots=5")
    with device_log() as log:
        prefilled(runner)
    planes = [line for line in log.lines if line in ("memcpy async H2D 32768", "memcpy async H2D 16384")]
    assert len(planes) == 2 * (5 + 6)
    assert "host function" not in log.lines


@pytest.mark.parametrize("mode", ["acl_graph", "npugraph_ex"])
def test_residents_change_under_one_capture(tmp_path: Path, mode: str) -> None:
    """What changes between replays: an expert's planes on the side stream and, when they are there, the table."""
    runner = runner_of(tmp_path, f"exe_mode={mode}", "slots=5", "max_swaps=-1")
    offload, device = parts(runner)
    running = prefilled(runner)
    first = step_log(runner, running)
    assert len([line for line in first if line == "captured host function"]) == 2
    usual = [line.split()[0] for line in step_log(runner, running)]
    here = [place for place in offload.slots if place[0] == 0]
    for place in here:
        offload.evict(place)
    table = f"memcpy async H2D {2 * 2 * 8 * 4}"
    assert step_log(runner, running)[0] == table
    node = device.nodes.nodes[4, 0]
    assert device.nodes.bridge.seen(node.payload) == int(offload.pool.step)
    with device_log() as log:
        for place in here:
            offload._fetch(place)
    assert log.lines == ["memcpy async H2D 32768", "memcpy async H2D 16384"] * len(here)
    assert not offload.resident(published=True)[0].any()
    assert step_log(runner, running)[0] == table
    assert [line.split()[0] for line in step_log(runner, running)] == usual
    assert offload.resident(published=True)[0].sum() == len(here)
    assert runner.decode.compiles == 1  # type: ignore[attr-defined]
