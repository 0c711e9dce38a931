"""Experts on the CPU inside a step on the NPU: the real bridge and torch_npu on the fake device's streams."""

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.ascend.log import device_log, forget_streams, most_pinned, most_registered, ran, registered, violations
from tests.ascend.workers import LAYERS, E, H, Inputs, K, T, Workers, until
from umbra.base.errors import UserError
from umbra.ops.ascend import shadow
from umbra.ops.ascend.bridge import Bridge
from umbra.ops.ascend.host_memory import Registered
from umbra.ops.ascend.shadow import ShadowNodes
from umbra.ops.bridge.calls import BridgeError

CALLBACK, HOST_FUNC = "8.3.RC1", "9.1.0"  # versions of CANN
BOTH = pytest.mark.parametrize("cann", [CALLBACK, HOST_FUNC])


@pytest.fixture
def workers() -> Iterator[Workers]:
    simulated = Workers()
    yield simulated
    simulated.gate.set()
    simulated.jobs.put(None)
    simulated.thread.join()


@pytest.fixture
def make(workers: Workers) -> Iterator[Callable[..., ShadowNodes]]:
    """Makes nodes. After the test, their streams are dropped if a callback is still queued in them."""
    opened = []

    def nodes(cann: str = CALLBACK, timeout_s: float = 30) -> ShadowNodes:
        opened.append(ShadowNodes(workers.submit, 0, range(LAYERS), E, H, K, torch.float32, timeout_s, cann))
        opened[-1].prepare(T)
        return opened[-1]

    yield nodes
    workers.gate.set()
    for one in opened:
        one.timeout_s = min(one.timeout_s, 0.2)
        one.close()
    forget_streams()


D2H = ["memcpy async D2H 96", "memcpy async D2H 24", "memcpy async D2H 24", "memcpy async D2H 16"]
SNAPSHOT = "memcpy async D2D 16"


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
    main = [line for stream, line in stalled if stream != side]
    assert main[0] == SNAPSHOT
    assert [line.split()[0] for line in main[1:]] == ["aclnnSigmoid"]  # did not wait
    # `join` of layer 0 comes after its callback and copy; then layer 1.
    names = [line if "memcpy" in line or stream == side else line.split()[0] for stream, line in after]
    layer = ["callback end", "memcpy async H2D 96", "aclnnAdd"]
    assert names[:3] == layer
    rest = [SNAPSHOT, *D2H, "callback begin", *layer]
    assert [name for name in names[3:] if name != "aclnnSigmoid"] == rest


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


def test_a_callback_that_never_fires(
    make: Callable[..., ShadowNodes], monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    """No thread is subscribed to the stream."""
    monkeypatch.setattr(Bridge, "subscribe", lambda *_: None)
    nodes, inputs = make(timeout_s=0.4), Inputs()
    workers.gate.set()
    nodes.begin(7, T)
    inputs.step(nodes)
    with pytest.raises(BridgeError, match=r"layer 0, step 7: its callback has not come, or not returned, within 0.4 s"):
        nodes.finish()
    assert not workers.seen


def test_a_worker_that_stalls(make: Callable[..., ShadowNodes], workers: Workers) -> None:
    """The stream continues with NaN sums, and later layers do not wait again."""
    nodes, inputs = make(timeout_s=0.4), Inputs()
    nodes.begin(1, T)
    inputs.step(nodes)
    with pytest.raises(BridgeError, match=r"layer 0, step 1: the shadow pool was not done within 400 ms"):
        nodes.finish()
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


def test_closed_while_a_callback_waits(make: Callable[..., ShadowNodes], workers: Workers) -> None:
    """The other layer's callback is still pending. The buffers of the late worker are not freed."""
    nodes, inputs = make(timeout_s=0.5), Inputs()
    nodes.begin(0, T)
    with device_log():
        inputs.step(nodes)
        until([], "callback begin")
        nodes.close()  # gives the worker its time
        assert [line for _, line in ran() if line.startswith("callback")] == [
            "callback end",
            "callback begin",
            "callback end",
        ]
    assert shadow.LEFT[-1] is nodes
    assert inputs.sums[0].cpu().isnan().all()
    workers.gate.set()


def test_no_pinned_memory(make: Callable[..., ShadowNodes]) -> None:
    nodes = make()
    most_pinned(1 << 20)
    try:
        with pytest.raises(UserError, match=r"layer 0: no pinned memory on the host for torch.float32 \(100000, 8\)"):
            nodes.prepare(100_000)
    finally:
        most_pinned(ctypes.c_size_t(-1).value)
    assert (100_000, 0) not in nodes.nodes


def test_registered_memory() -> None:
    """In slices of whole rows below 128 MB; what could not be registered whole is given back."""
    before, row = registered(), 50 << 20
    rows = torch.frombuffer(mmap.mmap(-1, 5 * row), dtype=torch.uint8).view(5, row)
    memory = Registered(rows, "layer 3")
    assert (registered() - before, len(memory.slices)) == (5 * row, 3)
    memory.end()
    most_registered(before + 3 * row)
    try:
        with pytest.raises(UserError, match=r"layer 3: CANN registers no more .* 1 slices of 250 MB\): raise `ulimit"):
            Registered(rows, "layer 3")
    finally:
        most_registered(ctypes.c_size_t(-1).value)
    assert registered() == before
    assert not violations()


def test_calls_that_are_refused(make: Callable[..., ShadowNodes]) -> None:
    nodes, inputs = make(), Inputs()
    with pytest.raises(KeyError, match="layer 0 was not prepared for 2 tokens"):
        nodes.submit(inputs.x[:2], inputs.ids[:2], inputs.weights[:2], inputs.places[0], 0)
    with pytest.raises(ValueError, match=r"layer 0: ids is torch.int64 \(3, 2\)"):
        nodes.submit(inputs.x, inputs.ids.long(), inputs.weights, inputs.places[0], 0)
    with pytest.raises(ValueError, match=r"layer 0: own is torch.float16 \(3, 8\)"):  # a sum that would take a Cast
        nodes.join(inputs.own, inputs.own.half(), 0)
    with pytest.raises(UserError, match=r"experts on the CPU need CANN: libnowhere.so: cannot open"):
        Bridge(0, 0, 1, library="libnowhere.so")
