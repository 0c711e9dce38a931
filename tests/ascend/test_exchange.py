"""Two ranks exchange the rows of their experts over the real hccl backend: golden kernels of a decode step eager and
in GE (captured: test_placement.py); the communicator and its window; real sizes; what falls back to gathered rows."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_npu

from tests.ascend.engine import QWEN3, Family, ascend_case, ascend_runner, generate, in_int8, prefilled
from tests.ascend.ge import ge_programs
from tests.ascend.log import device_log, violations
from tests.ascend.ranks import join_hccl, run_ranks
from tests.ascend.test_ge import casts
from tests.ascend.test_hccl import started
from tests.ascend.test_rules import SIZES, Size, kind_of, tiled
from tests.variants import thorough_after, thorough_but
from umbra.base.files import write_json
from umbra.executor.platform.ascend import device
from umbra.executor.platform.ascend.exchange import window_mb
from umbra.models.qwen3_moe.config import Qwen3MoeConfig
from umbra.ops.ascend.exchange import AscendExchange
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.ascend.weights import AscendExperts
from umbra.ops.formats import FORMATS, Format

BF16 = torch.bfloat16
SPLIT = ("attn_tp_size=1", "moe_tp_size=1")
PROMPTS = [[5, 17, 3, 88], [7]]  # one for each rank, so that eager steps are even too
MIXTURE = [  # of one row on each rank, eight experts, three of them for a row
    "aclnnMoeDistributeDispatchV4 (1,1024)bfloat16 (1,3)int32 group=group_name_2 (6,1024)bfloat16 (6)float32"
    " (768)int32 (4)int64 (8)int32 (0)int32 (6)float32",
    "aclnnGroupedMatmulWeightNz [(6,1024)bfloat16] [(4,1024,128)bfloat16:NZ] (4)int64 ints() [(6,128)bfloat16]",
    "aclnnSwiGlu (6,128)bfloat16 (6,64)bfloat16",
    "aclnnGroupedMatmulWeightNz [(6,64)bfloat16] [(4,64,1024)bfloat16:NZ] (4)int64 ints() [(6,1024)bfloat16]",
    "aclnnInplaceCopy (1,3)float32 (1,3)bfloat16",
    "aclnnMoeDistributeCombineV4 (6,1024)bfloat16 (1,3)int32 (768)int32 (8)int32 (1,3)float32 group=group_name_2"
    " (1,1024)bfloat16",
]
INT8_MIXTURE = [  # the rows in int8, as they are sent
    MIXTURE[0].replace("(6,1024)bfloat16", "(6,1024)int8"),
    "aclnnGroupedMatmulSwigluQuantWeightNzV2 (6,1024)int8 [(4,1024,128)int8:NZ] [(4,128)float32] (6)float32 (4)int64"
    " ints() (6,64)int8 (6)float32",
    "aclnnGroupedMatmulWeightNz [(6,64)int8] [(4,64,1024)int8:NZ] [(4,1024)bfloat16] [(6)float32] (4)int64 ints()"
    " [(6,1024)bfloat16]",
    *MIXTURE[4:],
]
FUSED = {  # kernels of a layer in a GE graph
    "MatMul": 3,
    "GroupedMatmul": 2,
    "AddRmsNorm": 2,
    "QkvRmsNormRopeCache": 1,
    "FusedInferAttentionScore": 1,
    "MoeGatingTopK": 1,
    "MoeDistributeDispatchV2": 1,
    "SwiGlu": 1,
    "MoeDistributeCombineV2": 1,
}


@dataclasses.dataclass
class Seen:
    step: list[str]  # the calls of a decode step to the device
    opened: list[str]
    kernels: dict[str, str]  # as the report has them


def decoded(rank: int, folder: Path, *overrides: str) -> Seen:
    case, ranks = started(rank, 2, folder, "exe_mode=eager", *SPLIT, *overrides)
    with device_log() as log:
        runner = ascend_runner(case, folder, ranks)
        prefilled(runner, PROMPTS)
    opened = log.find("hccl open")
    with device_log() as log:
        runner.loop.step()
    return Seen(log.lines, opened, runner.engine.kernels)


def mixture(lines: list[str]) -> list[str]:
    """The calls from the sending of rows to the sums, of the last layer."""
    start, end = (max(i for i, line in enumerate(lines) if what in line) for what in ("DispatchV", "CombineV"))
    return [" ".join(line.removeprefix("captured ").split()) for line in lines[start : end + 1]]


def plain(line: str) -> str:
    return " ".join(word for word in line.split() if word != "[]")


@pytest.mark.parametrize(
    ("family", "expected"), thorough_after(1, [(QWEN3, MIXTURE), (in_int8(QWEN3), INT8_MIXTURE)]), ids=["", "int8"]
)
def test_an_eager_step_exchanges_rows(tmp_path: Path, family: Family, expected: list[str]) -> None:
    ascend_case(tmp_path, family=family, hidden_size=1024)
    for rank, seen in enumerate(run_ranks(decoded, 2, tmp_path)):
        assert [plain(line) for line in mixture(seen.step)] == expected
        assert [line for line in seen.step if line.startswith("hccl")] == [
            "hccl AllGather 1 int64 name=group_name_1 ranks=2"  # the tokens, after the model
        ]
        # a communicator of its own, with the window of two rows of each rank
        wanted = f"hccl open name=group_name_2 ranks=2 rank={rank} buffer=2 expansion=2 deterministic=unset"
        assert seen.opened[0] == wanted
        assert seen.kernels["rows of experts on other ranks"] == f"{device.EXCHANGE}, at most 2 rows a rank"


@dataclasses.dataclass
class Graph:
    """The nodes of a decode step's GE graph that one rank has seen."""

    nodes: Counter[str]
    casts: list[tuple[str, torch.dtype]]
    exchanges: set[tuple[str, int, int]]  # communicator, ranks, rank


def in_ge(rank: int, folder: Path, *overrides: str) -> Graph:
    case, ranks = started(rank, 2, folder, "exe_mode=ge_graph", *SPLIT, *overrides)
    with ge_programs() as programs:
        generate(ascend_runner(case, folder, ranks))
    (program,) = programs
    attributes = [node.proto.attr for node in program.nodes if node.type.startswith("MoeDistribute")]
    names = {(a["group_ep"].s.decode(), a["ep_world_size"].i, a["ep_rank_id"].i) for a in attributes}
    return Graph(program.count(), casts(program), names)


def test_a_ge_graph_has_no_collective(tmp_path: Path) -> None:
    ascend_case(tmp_path, hidden_size=1024)
    for rank, graph in enumerate(run_ranks(in_ge, 2, tmp_path)):
        nodes = graph.nodes
        around = {"RmsNorm": 1, "MatMul": 1}  # the first norm, the head
        assert {name: nodes[name] for name in FUSED} == {
            name: 2 * count + around.get(name, 0) for name, count in FUSED.items()
        }
        assert not [name for name in nodes if name.startswith(("Hcom", "Select", "MoeInit", "MoeFinalize"))]
        assert graph.casts == [("MoeGatingTopK", torch.float32)] * 2
        assert graph.exchanges == {("group_name_2", 2, rank)}


def gathered(rank: int, folder: Path, kind: str) -> tuple[list[str], str]:
    """(kernels and collectives of a decode step, what the report says)"""
    overrides = {"off": ("ascend_config.exchange=false",)}.get(kind, ())
    if kind == "older CANN":
        device.get_cann_version = lambda: "8.3.RC1"
    if kind == "Atlas A2":
        torch_npu.npu.get_device_name = lambda *_: "Ascend910B3"
    seen = decoded(rank, folder, *overrides)
    return seen.step, seen.kernels["rows of experts on other ranks"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    thorough_after(
        1,
        [
            ("off", "ascend_config.exchange: false"),
            ("older CANN", "needs CANN 8.5, this is 8.3.RC1"),
            ("Atlas A2", "Ascend910B3 is no Atlas A3"),
            ("narrow", "128 columns, not 1024 to 8192"),
        ],
    ),
)
def test_rows_are_gathered(tmp_path: Path, kind: str, reason: str) -> None:
    ascend_case(tmp_path, hidden_size=128 if kind == "narrow" else 1024)
    for lines, told in run_ranks(gathered, 2, tmp_path, kind):
        collectives = [line.split()[1] for line in lines if line.startswith("hccl")]
        assert collectives == ["AllGather", "AllGather", "AllGather", "AllReduce"] * 2 + ["AllGather"]
        assert told == f"gathered ({reason})"


def real(rank: int, size: Size, formats: list[Format], ranks: int, rows: int, window: int) -> list[str]:
    """The rules that a layer's exchange breaks on one of `ranks` ranks, of which two run, with experts in `formats`."""
    join_hccl()
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": window}
    group = dist.new_group([0, 1], pg_options=options)
    name = group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    torch_npu.npu.config.allow_internal_format = True
    npu = torch.device("npu")
    exchange = AscendExchange(AscendOps(BF16, npu, "fusion_v2"), name, rank, ranks, size.experts, rows)
    x, weights = (torch.empty(rows, n, dtype=BF16, device=npu) for n in (size.hidden, size.top_k))
    ids = torch.empty(rows, size.top_k, dtype=torch.int32, device=npu)
    for format in formats:
        experts = AscendExperts(size.experts // ranks, size.inner, size.hidden, format, BF16, npu, kind=kind_of(size))
        for plane in (experts.w13, experts.w2):
            tiled(plane)
        try:
            exchange.mixture(x, weights, ids, experts)
            torch.npu.synchronize()
        except RuntimeError as error:
            return [str(error).splitlines()[0], *violations()]
    return violations()


WHOLE = {  # all experts of the real models
    "235b": dataclasses.replace(SIZES["235b_ep16"], experts=128),
    "m2": dataclasses.replace(SIZES["m2_tp8"], inner=1536),
    "oss120": dataclasses.replace(SIZES["oss120_ep8"], experts=128),
}


@pytest.mark.parametrize("ranks", thorough_but([8, 16], 16))
@pytest.mark.parametrize("model", thorough_but(WHOLE, "m2"))
def test_real_sizes_break_no_rule(tmp_path: Path, model: str, ranks: int) -> None:
    size = WHOLE[model]
    sizes = {"hidden_size": size.hidden, "num_experts": size.experts, "num_experts_per_tok": size.top_k}
    write_json(tmp_path / "config.json", {"model_type": "qwen3_moe"} | sizes)
    window = window_mb(32, Qwen3MoeConfig.from_folder(tmp_path))
    formats = [
        Format("q4", 32, zeros=True),
        *[FORMATS["w8a8"]] * (model != "oss120"),
    ]  # in bfloat16 an expert of 235B has 38 MB
    for broken in run_ranks(real, 2, size, formats, ranks, 32, window):
        assert broken == []


@pytest.mark.parametrize(("tokens", "taken"), [(0, False), (1, False), (4, False), (5, True), (32, True), (33, False)])
def test_few_rows_are_left_to_the_vector_cores(tokens: int, taken: bool) -> None:
    """Their mixture takes up to eight gathered rows: here of two ranks."""
    npu = torch.device("npu")
    ops = AscendOps(BF16, npu, "fusion_v2", gemv_tokens=8)
    experts = ops.expert_matrices(2, 64, 128, Format("q4", 32), npu)
    assert AscendExchange(ops, "", 0, 2, 4, 32).takes(tokens, experts) == taken
