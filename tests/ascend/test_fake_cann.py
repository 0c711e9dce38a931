"""The fake CANN itself: the behaviour that the tests that run on it rely on."""

import pytest
import torch
import torch_npu


def test_host_code_rejects_a_bad_call() -> None:
    rows, experts = torch.ones(4, 8).npu(), torch.zeros(4, 2, dtype=torch.int32).npu()
    torch_npu.npu_moe_init_routing(rows, experts, experts, 4)
    with pytest.raises(RuntimeError, match="int32 tensor expected"):
        torch_npu.npu_moe_init_routing(rows, experts.long(), experts, 4)


def test_a_capture_refuses_to_wait_for_the_device() -> None:
    x = torch.ones(4).npu()
    with pytest.raises(RuntimeError, match="107030"), torch.npu.graph(torch.npu.NPUGraph()):
        x.sum().item()
