"""L5: ranks with a fake device each over torch_npu's real hccl backend: the collectives of a step, and the settings of
each group's communicator."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.ascend.engine import GPT_OSS, M2, QWEN3, Family, ascend_case, ascend_runner, generate, prefilled
from tests.ascend.ge import GeProgram, Node, Shape, ge_programs
from tests.ascend.log import device_log
from tests.ascend.ranks import run_ranks
from tests.ascend.test_ge import casts
from tests.variants import thorough_after
from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv
from umbra.executor.launch.join import init_parallel
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.platform.ascend.device import AscendPlatform
from umbra.executor.platform.ascend.environment import ascend_environment

SUM, GATHER = "HcomAllReduce", "HcomAllGather"
EXPERTS = (SUM, "MoeFinalizeRoutingV2")
SPLITS: dict[str, tuple[str, ...]] = {"tp": (), "ep": ("moe_tp_size=1",), "dp": ("attn_tp_size=1",)}


def expected(family: Family, split: str, rank: int) -> list[tuple[str, str]]:
    """The collectives of two layers, each with the node that makes its input. MiniMax-M2's norm of queries and keys has
    one all-reduce, where attention is split; only the first rank adds the bias of gpt-oss's attention."""
    if split == "dp":  # a rank's tokens go to all experts: rows, weights, ids
        makers = {
            QWEN3: ("AddRmsNorm", "MoeGatingTopK", "MoeGatingTopK"),
            M2: ("AddRmsNormCast", "Cast", "MoeGatingTopK"),
        }
        return [*((GATHER, maker) for maker in makers[family]), EXPERTS] * 2
    norm = [(SUM, "RealDiv")] if family is M2 else []
    product = "MatMulV2" if family is GPT_OSS and rank == 0 else "MatMul"
    return [(SUM, "MaskedFill"), *[*norm, (SUM, product), EXPERTS] * 2, (GATHER, "MatMul")]


@dataclass
class Seen:
    """The observations of one rank."""

    collectives: list[tuple[str, str]]  # those of the decode graph, in order, and the nodes that make their inputs
    casts: list[tuple[str, torch.dtype]]
    groups: set[str]  # communicators of the collectives
    opened: list[str]  # communicators that were opened


def started(rank: int, world_size: int, folder: Path, *overrides: str) -> tuple[Case, RankEnv]:
    """The case and variables of a rank as the launcher starts it."""
    case = ascend_case(folder, f"world_size={world_size}", "strict=true", *overrides)
    os.environ.update(ascend_environment(platform_settings(case), {}))
    return case, RankEnv(rank, world_size, rank, world_size, "")


def decode(rank: int, folder: Path, *overrides: str) -> Seen:
    case, ranks = started(rank, 2, folder, "exe_mode=ge_graph", *overrides)
    with ge_programs() as programs, device_log() as log:
        generate(ascend_runner(case, folder, ranks))
    (program,) = programs
    nodes = [node for node in program.nodes if node.type.startswith("Hcom")]
    return Seen(
        collectives=[(node.type, maker(program, node)) for node in nodes],
        casts=casts(program),
        groups={node.proto.attr["group"].s.decode() for node in nodes},
        opened=log.find("hccl open"),
    )


def maker(program: GeProgram, node: Node) -> str:
    """The type of the node that makes the input of `node`, behind any views."""
    by_name = {other.name: other for other in program.nodes}
    while True:
        node = by_name[node.inputs[0].partition(":")[0]]
        if node.type not in ("Reshape", "Squeeze", "Unsqueeze"):
            return node.type


@pytest.mark.parametrize(
    ("family", "split"),
    [(M2, "ep"), *thorough_after(0, [(QWEN3, "dp"), (GPT_OSS, "tp"), (QWEN3, "tp"), (M2, "dp")])],
    ids=str,
)
def test_collectives_of_a_decode_step(tmp_path: Path, family: Family, split: str) -> None:
    ascend_case(tmp_path, family=family)  # written before all ranks read it
    for rank, seen in enumerate(run_ranks(decode, 2, tmp_path, *SPLITS[split])):
        assert seen.collectives == expected(family, split, rank)
        assert seen.casts == [("MoeGatingTopK", torch.bfloat16)] * 2 * (family is M2)
        (line,) = seen.opened  # all groups are the same two ranks: one communicator
        assert seen.groups == {line.split()[2].removeprefix("name=")}
        # attention has no collectives where it is data-parallel, so none run on the vector cores
        assert f"rank={rank} buffer=200 expansion={2 if split == 'dp' else 3} " in line


def prefetched(rank: int, folder: Path) -> list[tuple[str, Shape | None]]:
    """(the node that a prefetch waits for, the shape of what it reads) of each prefetch in a decode step's graph"""
    case, ranks = started(rank, 2, folder, "exe_mode=ge_graph", "ascend_config.prefetch=true")
    runner = ascend_runner(case, folder, ranks)
    with ge_programs() as programs:
        generate(runner)
    (program,) = programs
    types = {node.name: node.type for node in program.nodes}
    values = {out.source: out for node in program.nodes for out in node.outputs}
    return [(types[node.inputs[1].partition(":")[0]], values[node.inputs[0]].shape) for node in program.of("Cmo")]


@pytest.mark.thorough
def test_the_next_layers_projection_is_read_ahead(tmp_path: Path) -> None:
    ascend_case(tmp_path)
    for reads in run_ranks(prefetched, 2, tmp_path):
        assert reads == [("MoeFinalizeRoutingV2", (128, 384))]  # none after the last layer


ODD = [[5, 17, 3, 88], [7], list(range(30, 52))]  # 27 tokens, which two ranks cannot divide


def prefill_step(rank: int, folder: Path, *overrides: str) -> list[str]:
    """The calls of a prefill step to the device."""
    case, ranks = started(rank, 2, folder, "exe_mode=eager", *overrides)
    runner = ascend_runner(case, folder, ranks)
    with device_log() as log:
        prefilled(runner, ODD)
    return log.lines


def collectives(lines: list[str]) -> list[str]:
    """The collectives, each with its elements (of one rank's part, if there are parts) and type."""
    return [" ".join(line.split()[1:4]) for line in lines if line.startswith("hccl") and " open " not in line]


# Of a sequence-parallel prefill of ODD and a token of padding: a rank has 14 of 28 rows of 128. The all-reduce in a
# layer is of MiniMax-M2's norms.
ROWS = "1792 bfloat16"
LAYER = [f"AllGather {ROWS}", "AllReduce 56 float32", f"ReduceScatter {ROWS}"]
OF_EXPERTS = [f"AllGather {ROWS}", "AllGather 42 bfloat16", "AllGather 42 int32", f"ReduceScatter {ROWS}"]
SHARED_PREFILL = ["AllReduce 3584 bfloat16", *[*LAYER, *OF_EXPERTS] * 2, f"AllGather {ROWS}", "AllGather 192 bfloat16"]


def test_a_sequence_parallel_prefill(tmp_path: Path) -> None:
    """Norms, routers and residuals have a rank's own rows; attention and experts have all."""
    ascend_case(tmp_path, family=M2)
    for lines in run_ranks(prefill_step, 2, tmp_path, "sequence_parallel_tokens=27"):
        assert collectives(lines) == SHARED_PREFILL
        added = [line for line in lines if line.startswith("aclnnAddRmsNorm")]
        assert [line.split()[1].partition(")")[0] for line in added] == ["(14,128"] * 4


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
    [("attn_tp", (2, 3, 2), "AIV"), pytest.param("none", (2, 2, 2), "", marks=pytest.mark.thorough)],
)
def test_each_group_has_its_buffer_and_one_the_vector_cores(
    tmp_path: Path, aiv_group: str, modes: tuple[int, int, int], variable: str
) -> None:
    world, attn_tp, attn_dp = modes
    ascend_case(tmp_path)
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
