"""The fake CANN itself: the behaviour that the tests that run on it rely on."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch_npu

from ops.parallel.groups import reduce_scatter_single
from tests.ascend.log import device_log
from tests.ascend.ranks import join_hccl, run_ranks

BF16 = torch.bfloat16


def test_devices() -> None:
    assert torch.npu.device_count() == 16
    assert torch.npu.get_device_name(0) == "Ascend910_9391"
    with pytest.raises(RuntimeError, match="107001"):
        torch.npu.set_device(16)


@pytest.mark.parametrize("dtype", [BF16, torch.int32, torch.int64, torch.float32, torch.bool])
def test_a_tensor_comes_back_as_it_went(dtype: torch.dtype) -> None:
    there = torch.randint(0, 2, (3, 5)).to(dtype)
    here = there.npu()
    assert here.device == torch.device("npu", 0)
    assert torch.equal(here.cpu(), there)


def test_host_code_rejects_a_bad_call() -> None:
    rows, experts = torch.ones(4, 8).npu(), torch.zeros(4, 2, dtype=torch.int32).npu()
    torch_npu.npu_moe_init_routing(rows, experts, experts, 4)
    with pytest.raises(RuntimeError, match="int32 tensor expected"):
        torch_npu.npu_moe_init_routing(rows, experts.long(), experts, 4)


def test_kernels_are_logged_with_their_tensors() -> None:
    x, w = torch.ones(4, 64, dtype=BF16).npu(), torch.ones(64, 32, dtype=BF16).npu()
    with device_log() as log:
        y = torch_npu.npu_swiglu(x @ w)
        y.add_(y.sum(0))
        torch.cat([y, y[:1]])
        y[:, :8].t() @ y
    assert log.lines == [
        "aclnnMatmul (4,64)bfloat16 (64,32)bfloat16 (4,32)bfloat16",
        "aclnnSwiGlu (4,32)bfloat16 (4,16)bfloat16",
        "aclnnReduceSum (4,16)bfloat16 ints(0) (16)bfloat16",
        "aclnnInplaceAdd (4,16)bfloat16 (16)bfloat16 scalar:int64",
        "aclnnCat [(4,16)bfloat16 (1,16)bfloat16] (5,16)bfloat16",
        "aclnnMatmul (8,4)bfloat16@strides(1,16) (4,16)bfloat16 (8,16)bfloat16",
    ]


def test_a_kernel_with_many_arguments() -> None:
    """Tensors beyond the six that travel in registers, among absent ones, strings and numbers."""
    query, cache = torch.ones(2, 1, 8, 128, dtype=BF16).npu(), torch.ones(64, 128, 256, dtype=BF16).npu()
    blocks = torch.zeros(2, 8, dtype=torch.int32).npu()
    with device_log() as log:
        torch_npu.npu_fused_infer_attention_score(
            query, cache, cache, num_heads=8, num_key_value_heads=2, input_layout="BSND", scale=0.088,
            block_table=blocks, block_size=128, actual_seq_lengths_kv=[100, 200],
        )  # fmt: skip
    assert [line.split(" ", 1)[1] for line in log.lines] == [
        "(2,1,8,128)bfloat16 [(64,128,256)bfloat16] [(64,128,256)bfloat16] ints(100,200) (2,8)int32"
        " (2,1,8,128)bfloat16 (0)float32"
    ]


@pytest.mark.usefixtures("private_formats")
def test_weights_in_nz() -> None:
    padded = torch_npu.npu_format_cast(torch.ones(8, 60, 128, dtype=BF16).npu(), 29)
    assert padded.untyped_storage().nbytes() == 8 * 64 * 128 * 2  # rows in sixteens
    plain, x = torch.ones(8, 64, 128, dtype=BF16).npu(), torch.ones(4, 64, dtype=BF16).npu()
    counts = torch.ones(8, dtype=torch.int64).npu()
    with device_log() as log:
        weights = torch_npu.npu_format_cast(plain, 29)
        torch_npu.npu_grouped_matmul([x], [weights], group_list=counts, split_item=3, group_type=0, group_list_type=0)
    assert torch_npu.get_npu_format(weights) == torch_npu.Format.FRACTAL_NZ
    assert log.kernels() == ["aclnnNpuFormatCast", "aclnnGroupedMatmulWeightNz"]
    assert "[(8,64,128)bfloat16:NZ]" in log.lines[1]


def test_copies_and_waits_are_seen() -> None:
    x, pinned = torch.ones(3).npu(), torch.empty(3).pin_memory()
    assert pinned.is_pinned()
    with device_log() as log:
        x.cpu()
    assert log.waits() == ["synchronize stream", "memcpy D2H 12"]
    with device_log() as log:
        pinned.copy_(x, non_blocking=True)
    assert log.lines == ["memcpy async D2H 12"]
    assert not log.waits()
    with device_log() as log:
        x.sum().item()
        torch.npu.current_stream().synchronize()
    assert log.find("D2H") == ["memcpy D2H 4"]
    assert log.lines[-1] == "synchronize stream"


def test_a_captured_graph_replays_without_the_host() -> None:
    x = torch.ones(4).npu()
    side = torch.npu.Stream()
    captured = torch.npu.NPUGraph()
    with device_log() as log, torch.npu.graph(captured):
        y = x.relu()
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            z = y * 2
        torch.npu.current_stream().wait_stream(side)
        z.relu()
    begin = next(i for i, line in enumerate(log.lines) if line.startswith("capture begin"))
    graph = log.lines[begin].removeprefix("capture begin ")
    assert log.lines[begin + 1 :] == [
        "captured aclnnRelu (4)float32 (4)float32",
        "captured aclnnMuls (4)float32 scalar:int64 (4)float32",
        "captured aclnnRelu (4)float32 (4)float32",
        f"capture end {graph}",
    ]
    with device_log() as log:
        captured.replay()
    assert log.lines == [f"replay {graph}"]
    with device_log() as log:
        x.relu()
    assert log.lines == ["aclnnRelu (4)float32 (4)float32"]


def test_copies_and_host_functions_of_a_graph_happen_at_replay() -> None:
    """A copy to the host, a host function and a copy back, as experts on the CPU need in a captured step."""
    x, y, here, back = (
        torch.ones(3).npu(),
        torch.zeros(3).npu(),
        torch.zeros(3).pin_memory(),
        torch.zeros(3).pin_memory(),
    )
    calls = []

    def double(note: str) -> None:
        calls.append(note)
        back.copy_(here * 2)

    captured = torch.npu.NPUGraph()
    stream = torch.npu.Stream()
    torch_npu.npu._subscribe_report(stream)
    with device_log() as log, torch.npu.graph(captured, stream=stream):
        here.copy_(x, non_blocking=True)
        torch_npu.npu._launch_host_func(stream, double, "called")
        y.copy_(back, non_blocking=True)
    assert [line for line in log.lines if line.startswith("captured")] == [
        "captured memcpy async D2H 12",
        "captured host function",
        "captured memcpy async H2D 12",
    ]
    assert not calls
    assert y.tolist() == [0, 0, 0]
    for step in (1, 2):
        captured.replay()
        torch.npu.synchronize()
        assert len(calls) == step
    torch_npu.npu._unsubscribe_report(stream)
    assert y.tolist() == [2, 2, 2]


def test_a_capture_refuses_to_wait_for_the_device() -> None:
    x = torch.ones(4).npu()
    with pytest.raises(RuntimeError, match="107030"), torch.npu.graph(torch.npu.NPUGraph()):
        x.sum().item()


def reduce_on_each(rank: int) -> tuple[int, list[str]]:
    join_hccl({"hccl_buffer_size": 400, "hccl_op_expansion_mode": 3})
    with device_log() as log:
        x = torch.ones(6, dtype=BF16).npu()
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(12, dtype=BF16).npu(), x)
        reduce_scatter_single(torch.empty(3, dtype=BF16).npu(), x)
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(5, dtype=torch.int32).npu(), group=pair)
        device = torch.npu.current_device()
    return device, log.find("hccl")


def test_two_ranks() -> None:
    for rank, (device, lines) in enumerate(run_ranks(reduce_on_each, 2)):
        assert device == rank
        world, pair = (
            next(word for word in line.split() if word.startswith("name=")) for line in lines if "open" in line
        )
        assert world != pair
        assert lines == [
            f"hccl open {world} ranks=2 rank={rank} buffer=400 expansion=3 deterministic=unset",
            f"hccl AllReduce 6 bfloat16 {world} ranks=2",
            f"hccl AllGather 6 bfloat16 {world} ranks=2",
            f"hccl ReduceScatter 3 bfloat16 {world} ranks=2",
            f"hccl open {pair} ranks=2 rank={rank} buffer=200 expansion=0 deterministic=unset",
            f"hccl AllReduce 5 int32 {pair} ranks=2",
        ]


def scatter_on_each(rank: int, rows: int, dtype: torch.dtype) -> str:
    """What torch_npu says about a reduce-scatter of `rows` rows over two ranks."""
    join_hccl()
    x = torch.ones(rows, 4, dtype=dtype).npu()
    try:
        reduce_scatter_single(x.new_empty(rows // 2, 4), x)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("rows", "dtype", "refusal"),
    [
        (6, torch.float32, ""),
        (6, torch.uint8, "_reduce_scatter_base: Unsupported data type"),
        (5, torch.float32, "input tensor must be the same size as output size times world size"),
    ],
)
def test_a_reduce_scatter_is_of_equal_parts_in_types_that_can_be_added(
    rows: int, dtype: torch.dtype, refusal: str
) -> None:
    """By torch_npu's own host code, so the fake HCCL needs no rule for it."""
    for said in run_ranks(scatter_on_each, 2, rows, dtype):
        assert refusal in said
        assert bool(said) == bool(refusal)


def misbehave(rank: int, how: str) -> None:
    if rank == 1 and how == "raise":
        raise ValueError("the cup is empty")
    if rank == 1 and how == "die":
        os._exit(3)
    if how == "wait":
        time.sleep(60)
    join_hccl()  # needs both
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "limit_s", "complaint"),
    [
        ("raise", 60, r"rank 1 failed:(?s:.*)the cup is empty"),
        ("die", 60, "rank 1 died with status 3"),
        ("wait", 0.1, r"ranks \[0, 1\] did not finish in 0.1 s"),
    ],
)
def test_a_rank_that_fails_fails_the_test(how: str, limit_s: float, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        run_ranks(misbehave, 2, how, limit_s=limit_s)
