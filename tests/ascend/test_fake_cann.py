"""The fake CANN itself: the behaviour that the tests that run on it rely on."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch_npu

from tests.ascend.ranks import join_hccl, run_ranks


def test_host_code_rejects_a_bad_call() -> None:
    rows, experts = torch.ones(4, 8).npu(), torch.zeros(4, 2, dtype=torch.int32).npu()
    torch_npu.npu_moe_init_routing(rows, experts, experts, 4)
    with pytest.raises(RuntimeError, match="int32 tensor expected"):
        torch_npu.npu_moe_init_routing(rows, experts.long(), experts, 4)


def test_a_capture_refuses_to_wait_for_the_device() -> None:
    x = torch.ones(4).npu()
    with pytest.raises(RuntimeError, match="107030"), torch.npu.graph(torch.npu.NPUGraph()):
        x.sum().item()


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
