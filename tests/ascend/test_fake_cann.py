"""The fake CANN itself: the behaviour that the tests that run on it rely on."""

import pytest
import torch
import torch_npu

from tests.ascend.clock import Rates, races, timed
from tests.ascend.log import device_log


def test_host_code_rejects_a_bad_call() -> None:
    rows, experts = torch.ones(4, 8).npu(), torch.zeros(4, 2, dtype=torch.int32).npu()
    torch_npu.npu_moe_init_routing(rows, experts, experts, 4)
    with pytest.raises(RuntimeError, match="int32 tensor expected"):
        torch_npu.npu_moe_init_routing(rows, experts.long(), experts, 4)


def test_a_capture_refuses_to_wait_for_the_device() -> None:
    x = torch.ones(4).npu()
    with pytest.raises(RuntimeError, match="107030"), torch.npu.graph(torch.npu.NPUGraph()):
        x.sum().item()


@pytest.mark.parametrize("waits", [True, False])
def test_the_clock_times_streams_and_finds_races(waits: bool) -> None:
    """Copies of 4 MB, which take 4 ms, and kernels that read them, for 2 ms."""
    source, to = torch.zeros(1 << 20, pin_memory=True), torch.zeros(1 << 20).npu()
    side, copied, read = torch_npu.npu.Stream(), torch_npu.npu.Event(), torch_npu.npu.Event()
    with device_log() as log:
        for _ in range(4):
            with torch_npu.npu.stream(side):
                to.copy_(source, non_blocking=True)
                copied.record()
            copied.wait()
            to.sum()
            if waits:
                read.record()
                read.wait(side)
    trace = timed(log.given, Rates(link=2**30, read=2**31, multiply=1, launch=0), lambda _: 0.0)
    assert trace.seconds == pytest.approx((4 * 4 + 4 * 2 if waits else 4 * 4 + 2) / 1024, rel=0.01)
    assert bool(races(log.given)) != waits
