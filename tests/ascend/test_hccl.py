"""L5: ranks with a fake device each over torch_npu's real hccl backend: the collectives of a step, and the settings of
each group's communicator."""

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from executor.config.case import Case
from executor.config.env import RankEnv
from executor.engine.building import init_parallel
from executor.engine.settings import platform_settings
from executor.parallel.groups import Group
from executor.platform.ascend.device import AscendPlatform
from executor.platform.ascend.environment import ascend_environment
from tests.ascend.engine import ascend_case, ascend_runner, generate
from tests.ascend.ge import GeProgram, Node, ge_programs
from tests.ascend.log import device_log
from tests.ascend.ranks import run_ranks

SUM, GATHER = "HcomAllReduce", "HcomAllGather"
EXPERTS = (SUM, "MoeFinalizeRoutingV2")
# The input of each collective of two layers.
SPLITS: dict[str, tuple[tuple[str, ...], list[tuple[str, str]]]] = {
    "tp": ((), [(SUM, "MaskedFill"), *[(SUM, "MatMul"), EXPERTS] * 2, (GATHER, "MatMul")]),
    "ep": (("moe_tp_size=1",), [(SUM, "MaskedFill"), *[(SUM, "MatMul"), EXPERTS] * 2, (GATHER, "MatMul")]),
    # A rank's tokens go to all experts: rows, weights, ids.
    "dp": (
        ("attn_tp_size=1",),
        [(GATHER, "AddRmsNorm"), (GATHER, "RealDiv"), (GATHER, "MoeGatingTopKSoftmax"), EXPERTS] * 2,
    ),
}


@pytest.fixture(autouse=True)
def written_once(tmp_path: Path) -> None:
    """Writes the case before all ranks read it."""
    ascend_case(tmp_path)


@dataclass
class Seen:
    """The observations of one rank."""

    collectives: list[tuple[str, str]]  # those of the decode graph, in order, and the nodes that make their inputs
    groups: set[str]  # communicators of the collectives
    opened: list[str]  # communicators that were opened
    cache: list[str]  # lines that the compile cache printed


def started(rank: int, world_size: int, folder: Path, *overrides: str) -> tuple[Case, RankEnv]:
    """The case and variables of a rank as the launcher starts it."""
    case = ascend_case(folder, f"world_size={world_size}", "strict=true", *overrides)
    os.environ.update(ascend_environment(platform_settings(case), {}))
    return case, RankEnv(rank, world_size, rank, world_size, "")


def decode(rank: int, folder: Path, *overrides: str) -> Seen:
    case, ranks = started(rank, 2, folder, "exe_mode=ge_graph", *overrides)
    said = io.StringIO()
    with ge_programs() as programs, device_log() as log, contextlib.redirect_stdout(said):
        generate(ascend_runner(case, folder, ranks))
    (program,) = programs
    nodes = [node for node in program.nodes if node.type.startswith("Hcom")]
    return Seen(
        collectives=[(node.type, maker(program, node)) for node in nodes],
        groups={node.proto.attr["group"].s.decode() for node in nodes},
        opened=log.find("hccl open"),
        cache=[line for line in said.getvalue().splitlines() if line.startswith("compile cache")],
    )


def maker(program: GeProgram, node: Node) -> str:
    """The type of the node that makes the input of `node`, behind any views."""
    by_name = {other.name: other for other in program.nodes}
    while True:
        node = by_name[node.inputs[0].partition(":")[0]]
        if node.type not in ("Reshape", "Squeeze", "Unsqueeze"):
            return node.type


def decode_without_sums(rank: int, folder: Path) -> Seen:
    Group.all_reduce = lambda self, x: x  # type: ignore[method-assign]
    return decode(rank, folder)


@pytest.mark.parametrize("split", SPLITS)
def test_collectives_of_a_decode_step(tmp_path: Path, split: str) -> None:
    overrides, expected = SPLITS[split]
    for rank, seen in enumerate(run_ranks(decode, 2, tmp_path, *overrides)):
        assert seen.collectives == expected
        (line,) = seen.opened  # all groups are the same two ranks: one communicator
        assert seen.groups == {line.split()[2].removeprefix("name=")}
        # attention has no collectives where it is data-parallel, so none run on the vector cores
        assert f"rank={rank} buffer=200 expansion={2 if split == 'dp' else 3} " in line


def test_a_sum_left_out_is_seen(tmp_path: Path) -> None:
    for seen in run_ranks(decode_without_sums, 2, tmp_path):
        assert seen.collectives == [(GATHER, "MatMul")]


def communicators(rank: int, folder: Path, *overrides: str) -> tuple[dict[str, str], str]:
    """(group -> the communicator that it opens, HCCL_OP_EXPANSION_MODE) of one of four ranks."""
    case, ranks = started(rank, 4, folder, *overrides)
    platform = AscendPlatform(platform_settings(case), ranks)
    parallel = init_parallel(case, ranks, platform)
    opened = {}
    for name in ("world", "attn_tp", "attn_dp", "embed_tp"):
        with device_log() as log:
            getattr(parallel, name).all_reduce(torch.ones(1, device=platform.device))
        opened[name] = " ".join(line.partition(" ranks=")[2] for line in log.find("hccl open"))
    return opened, os.environ.get("HCCL_OP_EXPANSION_MODE", "")


FOUR = ("attn_tp_size=2", "embed_tp_size=2", "hccl_config.buffer_mb=300", "world_buffer_mb=400", "attn_tp_buffer_mb=64")


@pytest.mark.parametrize(
    ("aiv_group", "modes", "variable"),
    [("attn_tp", (2, 3, 2), "AIV"), ("world", (3, 2, 2), "AIV"), ("none", (2, 2, 2), "")],
)
def test_each_group_has_its_buffer_and_one_the_vector_cores(
    tmp_path: Path, aiv_group: str, modes: tuple[int, int, int], variable: str
) -> None:
    world, attn_tp, attn_dp = modes
    for rank, seen in enumerate(run_ranks(communicators, 4, tmp_path, *FOUR, f"aiv_group={aiv_group}")):
        assert seen == (
            {
                "world": f"4 rank={rank} buffer=400 expansion={world} deterministic=unset",
                "attn_tp": f"2 rank={rank % 2} buffer=64 expansion={attn_tp} deterministic=unset",
                "attn_dp": f"2 rank={rank // 2} buffer=300 expansion={attn_dp} deterministic=unset",
                "embed_tp": "",  # the same ranks as attn_tp: shared
            },
            variable,
        )


def test_each_rank_keeps_its_own_graph(tmp_path: Path) -> None:
    first = run_ranks(decode, 2, tmp_path, "enable_cache_compile=true")
    assert all("miss (no cache yet)" in line for seen in first for line in seen.cache)
    folders = sorted(path.name for path in (tmp_path / "cache" / tmp_path.name).iterdir())
    assert folders == ["rank0of2", "rank1of2"]
    second = run_ranks(decode, 2, tmp_path, "enable_cache_compile=true")
    assert [len(seen.cache) for seen in second] == [1, 1]
    assert all(seen.cache[0].startswith("compile cache: hit") for seen in second)
    assert [seen.collectives for seen in second] == [seen.collectives for seen in first] == [SPLITS["tp"][1]] * 2
