"""The fake CANN itself: what it must do for a test that runs on it to mean anything."""

import pytest
import torch
import torch_npu


def test_devices() -> None:
    assert torch.npu.device_count() == 16
    assert torch.npu.get_device_name(0) == "Ascend910_9391"
    with pytest.raises(RuntimeError, match="107001"):
        torch.npu.set_device(16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.int64, torch.float32, torch.bool])
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
