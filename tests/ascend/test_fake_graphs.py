"""torchair on the fake CANN, in its three ways of running: lowered to GE, captured once, and from a cache on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_npu
import torchair
from torch._dynamo.utils import counters
from torchair.configs.compiler_config import CompilerConfig

from tests.ascend.ge import ge_programs
from tests.ascend.log import device_log
from tests.ascend.ranks import join_hccl, run_ranks

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def forget_compiled() -> None:
    torch._dynamo.reset()


def config(mode: str) -> CompilerConfig:
    made = CompilerConfig()
    made.mode = mode
    return made


def backend(mode: str) -> Any:
    return torchair.get_npu_backend(compiler_config=config(mode))


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="npu")


class Gated(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch_npu.npu_swiglu(x @ w)
        return y, y.sum(0).int()


class Cached(Gated):
    """Its step is compiled through torchair's cache, which takes a method."""

    def __init__(self, folder: Path, dynamic: bool) -> None:
        super().__init__()
        self.step = torchair.inference.cache_compile(
            self.both, config=config("max-autotune"), cache_dir=str(folder), dynamic=dynamic
        )

    def both(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return Gated.forward(self, x, w)


def test_a_module_is_lowered_to_ge() -> None:
    compiled = torch.compile(Gated(), backend=backend("max-autotune"), fullgraph=True, dynamic=False)
    with ge_programs() as programs, device_log() as log:
        y, total = compiled(zeros(4, 64), zeros(64, 32))
        compiled(zeros(4, 64), zeros(64, 32))
    assert (y.shape, y.dtype, y.device.type) == ((4, 16), BF16, "npu")
    assert (total.shape, total.dtype) == ((16,), torch.int32)
    assert not log.find("aclnnMatmul")
    (program,) = programs
    assert program.runs == 2
    assert program.count() == {
        "Data": 2, "Const": 1, "MatMul": 1, "SwiGlu": 1, "ReduceSum": 1, "Cast": 1, "NetOutput": 1,
    }  # fmt: skip
    assert [(value.shape, value.dtype) for value in program.inputs()] == [((4, 64), BF16), ((64, 32), BF16)]
    assert [(value.source, value.shape) for value in program.outputs()] == [("SwiGlu:0", (4, 16)), ("Cast:0", (16,))]
    (product,) = program.of("MatMul")
    assert (product.outputs[0].shape, product.outputs[0].dtype) == ((4, 32), BF16)
    assert product.inputs == [value.source for value in program.inputs()] + [""]  # no bias
    assert not product.proto.attr["transpose_x1"].b
    assert program.options["mode"] == "max-autotune"


def test_formulas_of_dynamic_shapes() -> None:
    compiled = torch.compile(Gated(), backend=backend("max-autotune"), fullgraph=True, dynamic=True)
    with ge_programs() as programs:
        for rows in (4, 7):
            y, total = compiled(zeros(rows, 64), zeros(64, 32))
            assert (y.shape, total.shape) == ((rows, 16), (16,))
    (program,) = programs
    rows = program.inputs()[0].shape[0]
    assert isinstance(rows, str)
    assert program.outputs()[0].shape[0] == rows


def test_an_op_without_converter_is_refused() -> None:
    class Permuted(torch.nn.Module):
        def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
            return torch_npu.npu_moe_token_permute(x, experts)[0]

    compiled = torch.compile(Permuted(), backend=backend("max-autotune"), fullgraph=True, dynamic=False)
    with ge_programs() as programs, pytest.raises(Exception, match=r"(?i)npu_?moe_?token_?permute"):
        compiled(zeros(4, 64), zeros(4, 2, dtype=torch.int32))
    assert not programs


def cached_step(rank: int, folder: Path, dynamic: bool) -> tuple[int, int, torch.Size]:
    model = Cached(folder, dynamic)
    with ge_programs() as programs:
        y, _ = model.step(zeros(4, 64), zeros(64, 32))
    (program,) = programs
    assert program.count()["MatMul"] == 1
    return counters["stats"]["unique_graphs"], program.runs, y.shape


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_second_process_finds_the_cache(tmp_path: Path, dynamic: bool) -> None:
    assert run_ranks(cached_step, 1, tmp_path, dynamic) == [(1, 1, (4, 16))]
    (compiled,) = tmp_path.rglob("compiled_module")
    written = compiled.stat().st_mtime_ns
    assert run_ranks(cached_step, 1, tmp_path, dynamic) == [(0, 1, (4, 16))]  # Dynamo had nothing to do
    assert compiled.stat().st_mtime_ns == written


def test_reduce_overhead_replays_without_the_host() -> None:
    compiled = torch.compile(Gated(), backend=backend("reduce-overhead"), fullgraph=True, dynamic=False)
    x, w = zeros(4, 64), zeros(64, 32)
    torch._dynamo.mark_static_address(w)
    with device_log() as log:
        compiled(x, w)
    assert log.find("captured aclnnSwiGlu") == ["captured aclnnSwiGlu (4,32)bfloat16 (4,16)bfloat16"]
    replay = log.find("capture end")[-1].replace("capture end", "replay")
    with device_log() as log:
        compiled(x, w)
    # An input lies where the graph expects it only if it is marked: the others are copied there.
    assert log.lines == ["aclnnInplaceCopy (4,64)bfloat16 (4,64)bfloat16", replay]


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return torch_npu.npu_fused_infer_attention_score(
            q, cache, cache, num_heads=8, num_key_value_heads=2, input_layout="BSND", scale=0.088,
            block_table=blocks, block_size=128, actual_seq_lengths_kv=lengths,
        )[0]  # fmt: skip


@torch._functorch.config.patch(error_on_custom_op_aliasing=False)  # True where CI is set
def test_lengths_of_a_captured_attention_are_updated() -> None:
    compiled = torch.compile(Attention(), backend=backend("reduce-overhead"), fullgraph=True, dynamic=True)
    inputs = zeros(2, 1, 8, 128), zeros(64, 128, 256), zeros(2, 8, dtype=torch.int32)
    for tensor in inputs:
        torch._dynamo.mark_static(tensor)
        torch._dynamo.mark_static_address(tensor)
    compiled(*inputs, [100, 200])
    with device_log() as log:
        compiled(*inputs, [101, 201])
    replay, begin, update, end = log.lines
    assert replay.startswith("replay graph")
    assert (begin, end) == ("task update begin", "task update end")
    assert update.startswith("update aclnnFusedInferAttentionScore")
    assert " ints(101,201) " in update


def summed_over_ranks(rank: int) -> list[list[str]]:
    class Summed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            dist.all_reduce(x)
            return x

    join_hccl()
    with ge_programs() as programs:
        torch.compile(Summed(), backend=backend("max-autotune"), fullgraph=True, dynamic=False)(zeros(4, 8))
    return [[node.proto.attr["group"].s.decode() for node in p.of("HcomAllReduce")] for p in programs]


def test_collectives_are_nodes_of_the_graph() -> None:
    first, second = run_ranks(summed_over_ranks, 2)
    ((group,),) = first
    assert group
    assert first == second
