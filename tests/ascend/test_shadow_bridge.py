"""Experts on the CPU inside a step on the NPU: the real bridge and torch_npu on the fake device's streams."""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchair
from torch import Tensor

from ops.ascend import bridge, shadow
from ops.ascend.bridge import SUBMIT, Bridge, BridgeError
from ops.ascend.shadow import ShadowNodes
from tests.ascend.log import device_log, forget_streams, most_pinned, ran, violations
from tests.ascend.workers import LAYERS, E, H, Inputs, K, T, Workers, until
from umbra.errors import UserError

CALLBACK, HOST_FUNC = "8.3.RC1", "9.1.0"  # versions of CANN
BOTH = pytest.mark.parametrize("cann", [CALLBACK, HOST_FUNC])


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.gate.set()
    made.jobs.put(None)
    made.thread.join()


@pytest.fixture
def make(workers: Workers) -> Iterator[Callable[..., ShadowNodes]]:
    """Makes nodes. After the test, their streams are dropped if a callback is still queued in them."""
    made = []

    def nodes(cann: str = CALLBACK, timeout_s: float = 30) -> ShadowNodes:
        slots = torch.arange(LAYERS * E).view(LAYERS, E) * 10
        made.append(ShadowNodes(workers.submit, 0, dict(enumerate(slots)), H, K, torch.float32, timeout_s, cann))
        made[-1].prepare(T)
        return made[-1]

    yield nodes
    workers.gate.set()
    for one in made:
        one.timeout_s = min(one.timeout_s, 0.2)
        one.close()
    forget_streams()


D2H = ["memcpy async D2H 96", "memcpy async D2H 24", "memcpy async D2H 24"]


def check_order(begin: Callable[[], None], nodes: ShadowNodes, workers: Workers) -> None:
    """Checks the order of one step whose first callback stalls: what runs meanwhile, and what only afterwards."""
    side = nodes.side.npu_stream >> 4
    workers.gate.clear()
    with device_log():
        begin()
        stalled = until([], "callback begin")
        time.sleep(0.02)
        stalled += ran()
        workers.gate.set()
        nodes.finish()
        after = ran()
    assert [line for stream, line in stalled if stream == side] == [*D2H, "callback begin"]
    assert [line.split()[0] for stream, line in stalled if stream != side] == ["aclnnSigmoid"]  # did not wait
    # `join` of layer 0 comes after its callback and copy; then layer 1.
    names = [line if stream == side else line.split()[0] for stream, line in after]
    layer = ["callback end", "memcpy async H2D 96", "aclnnAdd"]
    assert names[:3] == layer
    assert [name for name in names[3:] if name != "aclnnSigmoid"] == [*D2H, "callback begin", *layer]


@BOTH
def test_eager(make: Callable[..., ShadowNodes], workers: Workers, cann: str) -> None:
    nodes, inputs = make(cann), Inputs()
    for step in range(3):
        wanted = inputs.fill(step)
        nodes.begin(step, T)
        check_order(lambda: inputs.step(nodes), nodes, workers)
        for sums, right in zip(inputs.sums, wanted, strict=True):
            assert torch.allclose(sums.cpu(), right)
    assert [seen[:2] for seen in workers.seen] == [(layer, step) for step in range(3) for layer in range(LAYERS)]


@BOTH
def test_captured_once_and_replayed(make: Callable[..., ShadowNodes], workers: Workers, cann: str) -> None:
    nodes, inputs, graph = make(cann), Inputs(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        inputs.step(nodes)
    assert not workers.seen
    for step in range(4):
        wanted = inputs.fill(step)
        nodes.begin(step, T)
        check_order(graph.replay, nodes, workers)
        for sums, right in zip(inputs.sums, wanted, strict=True):
            assert torch.allclose(sums.cpu(), right)
    assert [seen[:2] for seen in workers.seen] == [(layer, step) for step in range(4) for layer in range(LAYERS)]


def test_tables_are_read_at_each_replay(make: Callable[..., ShadowNodes], workers: Workers) -> None:
    nodes, inputs, graph = make(), Inputs(), torch.npu.NPUGraph()
    workers.gate.set()
    with torch.npu.graph(graph):
        inputs.step(nodes)
    for step, slot in enumerate((5, 900)):
        for row in nodes.slots.values():
            row.fill_(slot)
        nodes.begin(step, T)
        graph.replay()
        nodes.finish()
        assert [float(sums[0, 0]) for sums in inputs.sums] == [K * slot, K * slot]


def no_wait(nodes: ShadowNodes) -> None:
    for node in nodes.nodes.values():
        node.back = SimpleNamespace(record=node.back.record, wait=lambda: None)


def no_fork(nodes: ShadowNodes) -> None:
    nodes.side = torch.npu.current_stream()
    nodes.bridge.subscribe(nodes.side.npu_stream)


def undrained(nodes: ShadowNodes) -> None:
    """Enqueues the callback while torch_npu's own queue still holds the copies."""
    side = nodes.side
    raw = side.npu_stream

    class Undrained(torch.npu.Stream):
        npu_stream = raw

    nodes.side = Undrained(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)


@pytest.mark.parametrize("spoil", [no_wait, no_fork, undrained])
def test_orders_that_are_wrong_are_seen(
    make: Callable[..., ShadowNodes], workers: Workers, spoil: Callable[[ShadowNodes], None]
) -> None:
    """Mutations that `check_order` must detect."""
    nodes, inputs = make(), Inputs()
    spoil(nodes)
    for step in range(50):  # torch_npu's queue may be empty in time, by chance
        nodes.begin(step, T)
        try:
            check_order(lambda: inputs.step(nodes), nodes, workers)
        except AssertionError:
            return
    pytest.fail("nothing was seen")


class TwoLayers(torch.nn.Module):
    def __init__(self, nodes: int):
        super().__init__()
        self.nodes = nodes

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, own: Tensor) -> Tensor:
        for layer in range(LAYERS):
            sums = torch.ops.umbra.shadow_submit(x, ids, weights, layer, self.nodes)
            y = own + torch.sigmoid(x).sum()
            x = torch.ops.umbra.shadow_join(sums, y, layer, self.nodes)
        return x


@pytest.mark.parametrize("mode", ["reduce-overhead", "npugraph_ex"])
def test_torchair(make: Callable[..., ShadowNodes], workers: Workers, mode: str) -> None:
    torch._dynamo.reset()
    nodes, inputs, config = make(), Inputs(), torchair.CompilerConfig()
    config.mode = mode
    step = torch.compile(
        TwoLayers(nodes.number), backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True, dynamic=False
    )
    tensors = inputs.x, inputs.ids, inputs.weights, inputs.own
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)
    nodes.begin(0, T)
    workers.gate.set()
    with device_log() as log:
        step(*tensors)
        nodes.finish()
    captured = [line for line in log.lines if line.startswith("captured")]
    assert [line for line in captured if "host function" in line or "memcpy" in line] == [
        f"captured {line}" for line in [*D2H, "host function", "memcpy async H2D 96"] * LAYERS
    ]
    workers.seen.clear()
    for number in (1, 2):
        inputs.fill(number)
        workers.gate.clear()
        nodes.begin(number, T)
        with device_log() as log:
            step(*tensors)
            stalled = until([], "callback begin")
            workers.gate.set()
            nodes.finish()
        assert [line.split()[0] for line in log.lines] == ["replay", "synchronize"]
        assert "aclnnSigmoid" in [line.split()[0] for _, line in stalled]
        assert workers.seen[-2][:2] == (0, number)
        assert workers.seen[-2][2] == float(inputs.x[0, 0])
    assert len(workers.seen) == 2 * LAYERS


@pytest.mark.parametrize("captured", [False, True])
def test_a_callback_that_never_fires(
    make: Callable[..., ShadowNodes], monkeypatch: pytest.MonkeyPatch, workers: Workers, captured: bool
) -> None:
    """No thread is subscribed to the stream."""
    monkeypatch.setattr(Bridge, "subscribe", lambda *_: None)
    nodes, inputs, graph = make(timeout_s=0.4), Inputs(), torch.npu.NPUGraph()
    workers.gate.set()
    if captured:
        with torch.npu.graph(graph):
            inputs.step(nodes)
    nodes.begin(7, T)
    start = time.monotonic()
    graph.replay() if captured else inputs.step(nodes)
    with pytest.raises(BridgeError, match=r"layer 0, step 7: its callback has not come, or not returned, within 0.4 s"):
        nodes.finish()
    assert time.monotonic() - start >= 0.4
    assert not workers.seen


@BOTH
def test_a_worker_that_stalls(make: Callable[..., ShadowNodes], workers: Workers, cann: str) -> None:
    """The stream continues with NaN sums, and later layers do not wait again."""
    nodes, inputs = make(cann, timeout_s=0.4), Inputs()
    workers.gate.set()
    nodes.begin(0, T)
    inputs.step(nodes)
    nodes.finish()
    workers.gate.clear()
    nodes.begin(1, T)
    start = time.monotonic()
    inputs.step(nodes)
    with pytest.raises(BridgeError, match=r"layer 0, step 1: the shadow pool was not done within 400 ms"):
        nodes.finish()
    assert time.monotonic() - start >= 0.4
    assert all(sums.cpu().isnan().all() for sums in inputs.sums)
    workers.gate.set()  # comes late
    nodes.begin(2, T)
    inputs.step(nodes)
    with pytest.raises(BridgeError, match="layer 0, step 1"):  # for good
        nodes.finish()


@pytest.mark.parametrize(("how", "error"), [("fails", "failed"), ("refuse", "refused the job")])
def test_a_worker_that_fails(make: Callable[..., ShadowNodes], workers: Workers, how: str, error: str) -> None:
    nodes, inputs = make(), Inputs()
    workers.gate.set()
    setattr(workers, how, True)
    nodes.begin(3, T)
    inputs.step(nodes)
    with pytest.raises(BridgeError, match=f"layer 0, step 3: the shadow pool {error}"):
        nodes.finish()
    assert inputs.sums[0].cpu().isnan().all()


def test_a_pool_that_does_not_even_take_the_job(make: Callable[..., ShadowNodes], workers: Workers) -> None:
    nodes, inputs = make(timeout_s=0.4), Inputs()
    workers.hangs = True
    nodes.begin(9, T)
    inputs.step(nodes)
    with pytest.raises(BridgeError, match=r"layer 0, step 9: its callback has not come, or not returned, within 0.8 s"):
        nodes.finish()
    nodes.close()
    assert shadow.LEFT[-1] is nodes


@BOTH
def test_closed_while_a_callback_waits(make: Callable[..., ShadowNodes], workers: Workers, cann: str) -> None:
    """The other layer's callback is still pending. The buffers of the late worker are not freed."""
    nodes, inputs = make(cann, timeout_s=2), Inputs()
    nodes.begin(0, T)
    with device_log():
        inputs.step(nodes)
        until([], "callback begin")
        start = time.monotonic()
        nodes.close()
        assert time.monotonic() - start >= 2  # for the worker
        assert [line for _, line in ran() if line.startswith("callback")] == [
            "callback end", "callback begin", "callback end",
        ]  # fmt: skip
    assert shadow.LEFT[-1] is nodes
    assert inputs.sums[0].cpu().isnan().all()
    workers.gate.set()


def test_closed_while_a_callback_never_fires(
    make: Callable[..., ShadowNodes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes, inputs = make(timeout_s=0.3), Inputs()
    subscribed = nodes.bridge
    forget_streams()  # its subscription too
    inputs.step(nodes)
    nodes.close()
    assert "closed with work under way" in capsys.readouterr().out
    assert subscribed.handle is None


@BOTH
def test_closed_when_all_is_done(make: Callable[..., ShadowNodes], workers: Workers, cann: str) -> None:
    nodes, inputs = make(cann, timeout_s=100), Inputs()
    workers.gate.set()
    nodes.begin(0, T)
    inputs.step(nodes)
    nodes.finish()
    left = len(shadow.LEFT)
    start = time.monotonic()
    nodes.close()
    nodes.close()
    assert time.monotonic() - start < nodes.timeout_s  # nothing to wait for
    assert len(shadow.LEFT) == left


def test_no_pinned_memory(make: Callable[..., ShadowNodes]) -> None:
    nodes = make()
    most_pinned(1 << 20)
    try:
        with pytest.raises(UserError, match=r"layer 0: no pinned memory on the host for torch.float32 \(100000, 8\)"):
            nodes.prepare(100_000)
    finally:
        most_pinned(ctypes.c_size_t(-1).value)
    assert (100_000, 0) not in nodes.nodes


def test_calls_that_are_refused(make: Callable[..., ShadowNodes]) -> None:
    nodes, inputs = make(), Inputs()
    with pytest.raises(KeyError, match="layer 0 was not prepared for 2 tokens"):
        nodes.submit(inputs.x[:2], inputs.ids[:2], inputs.weights[:2], 0)
    with pytest.raises(ValueError, match=r"layer 0: ids is torch.int64 \(3, 2\)"):
        nodes.submit(inputs.x, inputs.ids.long(), inputs.weights, 0)
    with pytest.raises(ValueError, match=r"layer 0: own is torch.float16 \(3, 8\)"):  # a sum that would take a Cast
        nodes.join(inputs.own, inputs.own.half(), 0)
    with pytest.raises(UserError, match=r"experts on the CPU need CANN: libnowhere.so: cannot open"):
        Bridge(0, 0, 1, library="libnowhere.so")


@pytest.mark.parametrize(
    ("cann", "name"),
    [("8.3.RC1", "aclrtLaunchCallback"), ("8.5.0", "aclrtLaunchHostFunc"), (None, "aclrtLaunchCallback"),
     ("10.0", "aclrtLaunchHostFunc")],
)  # fmt: skip
def test_which_way_is_told(workers: Workers, cann: str | None, name: str) -> None:
    made = Bridge(workers.submit, 0, 1, cann)
    assert f"are called by {name}" in made.how
    assert made.close(1)


def test_a_bridge_serves_so_many_streams(workers: Workers) -> None:
    made = Bridge(workers.submit, 0, 1, CALLBACK)
    for stream in range(1, 33):
        made.subscribe(stream << 30)
        made.subscribe(stream << 30)  # again is nothing new
    with pytest.raises(BridgeError, match="32 streams at most"):
        made.subscribe(33 << 30)
    assert made.close(1)


def test_the_fake_sees_device_calls_inside_a_callback(make: Callable[..., ShadowNodes], workers: Workers) -> None:
    acl, status = ctypes.CDLL("libascendcl.so"), []

    def submit(context: int, job: Any) -> int:
        p = ctypes.c_void_p()
        status.append(acl.aclrtMalloc(ctypes.byref(p), ctypes.c_size_t(64), 0))
        status.append(acl.aclrtSynchronizeDevice())
        return 1

    nodes, inputs, function = make(), Inputs(), SUBMIT(submit)
    other = ShadowNodes(ctypes.cast(function, ctypes.c_void_p).value or 0, 0, nodes.slots, H, K, torch.float32, 5)
    other.prepare(T)
    other.begin(0, T)
    inputs.step(other)
    with pytest.raises(BridgeError):
        other.finish()
    other.close()
    assert all(status)
    assert violations() == ["allocation inside a callback", "aclrtSynchronizeDeviceWithTimeout inside a callback"]


def test_the_fake_sees_both_kinds_on_one_stream(make: Callable[..., ShadowNodes], workers: Workers) -> None:
    first, second = make(CALLBACK), make(HOST_FUNC)
    second.side = first.side
    inputs = Inputs()
    workers.gate.set()
    first.begin(0, T)
    inputs.step(first)
    with pytest.raises(BridgeError, match="aclrtLaunchHostFunc: error 207000"):
        inputs.step(second)
    assert violations() == ["aclrtLaunchCallback and aclrtLaunchHostFunc on one stream"]
    first.finish()


def test_the_fake_sees_captured_copies_of_pageable_memory(make: Callable[..., ShadowNodes]) -> None:
    acl, x = ctypes.CDLL("libascendcl.so"), torch.zeros(4).npu()
    pageable, pinned = torch.zeros(4), torch.zeros(4, pin_memory=True)
    with torch.npu.graph(torch.npu.NPUGraph()):
        stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        status = [
            acl.aclrtMemcpyAsync(*(ctypes.c_void_p(a) for a in (here.data_ptr(), 16, x.data_ptr(), 16)), 2, stream)
            for here in (pinned, pageable)
        ]
    assert status == [0, 207000]
    assert violations() == ["a captured copy of host memory that is not pinned"]


def test_it_builds_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built = bridge.build(tmp_path / "umbra_bridge.so")
    made = built.stat().st_mtime_ns
    assert bridge.build(built).stat().st_mtime_ns == made
    assert list(tmp_path.iterdir()) == [built]
    job = tmp_path / "job.h"
    job.touch()
    os.utime(job, ns=(made + 1, made + 1))
    monkeypatch.setattr(bridge, "JOB", job)
    assert bridge.build(built).stat().st_mtime_ns > made
