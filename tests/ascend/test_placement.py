"""Experts in slots on two ranks over the real hccl backend: what is launched, what moves, and that graphs stay."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tests.ascend.engine import ascend_case, ascend_runner, prefilled
from tests.ascend.log import device_log
from tests.ascend.ranks import run_ranks
from tests.ascend.test_exchange import MIXTURE, PROMPTS, SPLIT, plain
from tests.ascend.test_hccl import started
from umbra.executor.engine.step import rebalancing

LOOK_UP, COUNT = "aclnnIndexSelect (8)int32 (3)int32 (3)int32", "aclnnInplaceAdd (5)int64 (5)int64 scalar:int64"
MOVE = [  # of a layer's experts in tiles, three of five: out of its matrices, to the other rank, and into them in place
    "aclnnNpuFormatCast",
    "aclnnIndex",
    "aclnnCat",
    "aclnnNpuFormatCast",
    "aclnnIndex",
    "aclnnCat",
    "aclnnCat",
    "hccl",
    *["aclnnNpuFormatCast", "aclnnInplaceCopy", "aclnnIndexPutImpl", "aclnnNpuFormatCast", "memcpy"] * 2,
    "aclnnInplaceZero",
]


@dataclasses.dataclass
class Seen:
    steps: list[list[str]]  # the calls of each decode step to the device
    held: list[list[int]]  # experts in the slots of each layer
    report: list[dict[str, Any]]


def placed(rank: int, folder: Path, *overrides: str) -> Seen:
    """Five decode steps. The fake device counts nothing, so placements are made up: each rank gets the other's."""
    rebalancing.next_placement = lambda counts, ranks, before: np.roll(before, 5)
    case, ranks = started(rank, 2, folder, *SPLIT, "expert_slots=5", "rebalance_steps=3", *overrides)
    runner = ascend_runner(case, folder, ranks)
    prefilled(runner, PROMPTS)
    steps = []
    for _ in range(5):
        with device_log() as log:
            runner.loop.step()
        steps.append([line for line in log.lines if not line.startswith("synchronize")])
    moved = runner.engine.rebalancing
    assert moved
    return Seen(steps, [layer.held.tolist() for layer, _ in moved.layers], moved.report())


def test_experts_move_between_steps(tmp_path: Path) -> None:
    """The second decode step counts, a layer moves behind the third and one behind the fourth: three experts to each
    rank, as both have two of eight."""
    ascend_case(tmp_path, hidden_size=1024)
    first, second = run_ranks(placed, 2, tmp_path, "exe_mode=acl_graph")
    for seen in (first, second):
        kernels = [plain(line.removeprefix("captured ")) for line in seen.steps[0]]
        assert [kernels.count(line) for line in (LOOK_UP, COUNT)] == [2, 2]
        begin = kernels.index(LOOK_UP)
        around = [line.split()[0] for line in kernels[begin : begin + len(MIXTURE) + 2]]
        assert around == [
            LOOK_UP.split()[0],
            MIXTURE[0].split()[0],
            COUNT.split()[0],
            *(line.split()[0] for line in MIXTURE[1:]),
        ]
        counted, *moves, left = ([plain(line) for line in after(lines)] for lines in seen.steps[1:])
        assert [line for line in counted if line.startswith("hccl")] == [
            "hccl AllReduce 16 int64 name=group_name_1 ranks=2"
        ]
        for lines in moves:
            calls = [line.split()[0] for line in lines if not line.startswith("memcpy H2D")]
            assert calls == MOVE
            assert "hccl AlltoAllV per-rank uint8 name=group_name_1 ranks=2" in lines
            assert lines[-1] == "memcpy H2D 32"  # the table of eight experts, last
        assert [line.split()[0] for line in left if line.startswith("hccl")] == ["hccl"]  # counts again
        for lines in seen.steps[1:]:
            assert not [line for line in lines if line.startswith("capture")]
            assert len([line for line in lines if line.startswith("replay graph")]) == 1
    assert first.held == second.held
    assert [one["experts"] for one in first.report] == [12, 0]


def after(lines: list[str]) -> list[str]:
    """The calls behind the step itself, which ends with its tokens."""
    return lines[lines.index("memcpy D2H 16") + 1 :]
