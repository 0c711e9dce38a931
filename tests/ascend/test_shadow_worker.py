"""A step on the fake NPU, with missing experts computed by a real shadow pool: bridge and native worker together."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ops.ascend import shadow
from ops.ascend.bridge import BridgeError
from ops.ascend.shadow import ShadowNodes
from ops.cpu import engine
from ops.cpu.shadow import ShadowPool, Worker
from ops.format import FORMATS
from tests.ascend.log import device_log, forget_streams
from tests.ops.cpu.test_shadow import Model, cpu, routing, teams
from tests.variants import thorough_but

LAYERS, E, K, FIRST, CANN = 2, 8, 3, 2, ["8.3.RC1", "9.1.0"]


class Step:
    """Two layers with the same x and routing. Sigmoid stands for the resident experts."""

    def __init__(self, tokens: int, dtype: torch.dtype, cann: str, timeout_s: float, slow: bool):
        engine.start(1, "generic" if slow else "auto")
        torch.manual_seed(0)
        format, inner = ("float32", 1024) if slow else ("q4", 64)
        self.models = [Model(FORMATS[format], E, inner, first=FIRST) for _ in range(LAYERS)]
        self.slots = torch.zeros(LAYERS, E, dtype=torch.int64)
        self.pool = ShadowPool(teams(1), timeout=0.001)
        self.worker = Worker(self.pool)
        for number, model in enumerate(self.models):
            model.layer = replace(model.layer, number=number)
            self.worker.layer(model.layer, tokens, K, dtype)
        hidden = self.models[0].blocks.hidden
        slots = dict(enumerate(self.slots))
        self.nodes = ShadowNodes(self.worker.submit, self.worker.context, slots, hidden, K, dtype, timeout_s, cann)
        self.nodes.prepare(tokens)
        self.here = (
            torch.zeros(tokens, hidden, dtype=dtype),
            torch.zeros(tokens, K, dtype=dtype),
            torch.zeros(tokens, K).int(),
        )
        self.x, self.weights, self.ids = (t.npu() for t in self.here)
        self.sums: list[Tensor] = []

    def fill(self, seed: int) -> None:
        torch.manual_seed(seed)
        x, weights, ids = self.here
        x.copy_(torch.randn(x.shape))
        for to, value in zip((weights, ids), routing(*ids.shape, E), strict=True):
            to.copy_(value)
        for there, value in zip((self.x, self.weights, self.ids), self.here, strict=True):
            there.copy_(value)

    def run(self) -> None:
        self.sums = []
        for layer in range(LAYERS):
            self.sums.append(self.nodes.submit(self.x, self.ids, self.weights, layer))
            self.nodes.join(self.sums[-1], self.x.sigmoid(), layer)

    def expected(self, layer: int) -> Tensor:
        x, weights, ids = self.here
        e = (ids - FIRST).long()
        missing = (e >= 0) & (e < E) & (self.slots[layer][e.clamp(0, E - 1)] == 0)
        out = cpu.moe(x.float(), weights.float(), ids.long().where(missing, -1), self.models[layer].experts, FIRST)
        return out.to(x.dtype)


@pytest.fixture
def make() -> Iterator[Callable[..., Step]]:
    made: list[Step] = []

    def step(cann: str, dtype: torch.dtype = torch.bfloat16, timeout_s: float = 30, slow: bool = False) -> Step:
        made.append(Step(1024 if slow else 5, dtype, cann, timeout_s, slow))
        return made[-1]

    yield step
    for one in made:
        one.nodes.close()
    forget_streams()


@pytest.mark.parametrize("cann", CANN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_captured_once_and_replayed_while_residents_change(
    make: Callable[..., Step], dtype: torch.dtype, cann: str
) -> None:
    step, graph = make(cann, dtype), torch.npu.NPUGraph()
    with device_log() as log, torch.npu.graph(graph):
        step.run()
    assert log.kernels() == ["aclnnSigmoid", "aclnnAdd"] * LAYERS  # no Cast
    sums = step.sums
    assert all(s.dtype == dtype for s in sums)
    routed = torch.zeros(E, dtype=torch.int64)
    for number in range(12):
        step.slots.copy_(torch.rand(LAYERS, E) < number / 10)  # none resident at first, all in the end
        step.fill(number)
        step.nodes.begin(number, 5)
        graph.replay()
        step.nodes.finish()
        for layer in range(LAYERS):
            assert torch.equal(sums[layer].cpu(), step.expected(layer))
        e = step.here[2].flatten() - FIRST
        routed += e[(e >= 0) & (e < E)].bincount(minlength=E)
    assert all(torch.equal(model.layer.counts, routed) for model in step.models)
    assert not sums[0].cpu().any()


def slow(make: Callable[..., Step], cann: str, timeout_s: float) -> Step:
    """The pool takes a second for a layer."""
    step = make(cann, timeout_s=timeout_s, slow=True)
    step.fill(0)
    step.nodes.begin(4, 1024)
    return step


def arrives(sums: Tensor, expected: Tensor) -> bool:
    deadline = time.monotonic() + 60
    while not torch.equal(sums, expected) and time.monotonic() < deadline:
        time.sleep(0.01)
    return torch.equal(sums, expected)


@pytest.mark.parametrize("cann", thorough_but(CANN, CANN[-1]))
def test_a_pool_that_is_too_slow(make: Callable[..., Step], cann: str) -> None:
    """The step ends in an error with NaNs on the device, and buffers that the pool still writes are not freed."""
    step = slow(make, cann, timeout_s=0.02)
    step.run()
    with pytest.raises(BridgeError, match=r"layer 0, step 4: the shadow pool was not done within 20 ms"):
        step.nodes.finish()
    assert all(sums.cpu().isnan().all() for sums in step.sums)
    assert arrives(step.nodes.nodes[1024, 0].sums, step.expected(0))


@pytest.mark.parametrize("cann", CANN)
def test_a_stopped_pool(make: Callable[..., Step], cann: str) -> None:
    """A stopped pool is an error only if experts are missing."""
    step = make(cann)
    step.pool.stop()
    for resident, missing in ((1, False), (0, True)):
        step.slots.fill_(resident)
        step.fill(0)
        step.nodes.begin(8, 5)
        step.run()
        if missing:
            with pytest.raises(BridgeError, match="layer 0, step 8: the shadow pool failed"):
                step.nodes.finish()
        else:
            step.nodes.finish()
        assert all(bool(sums.cpu().isnan().all()) == missing for sums in step.sums)


@pytest.mark.parametrize(
    ("cann", "within_s"), [(CANN[0], 60), pytest.param(CANN[0], 0.01, marks=pytest.mark.thorough), (CANN[1], 0.01)]
)
def test_closed_while_a_job_is_computed(
    make: Callable[..., Step], cann: str, within_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Closing waits for the job or keeps everything that it touches, also if pool, worker and experts are released."""
    step, left = slow(make, cann, timeout_s=30), len(shadow.LEFT)
    times, expected = step.models[0].layer.times, step.expected(0)
    step.run()
    torch.npu.current_stream().npu_stream  # noqa: B018 (torch_npu's own queue is empty then)
    while not step.models[0].layer.counts.any():  # the callback has not come
        time.sleep(0.001)
    step.nodes.timeout_s = within_s
    step.nodes.close()
    late = step.nodes.nodes[1024, 0].sums
    assert len(shadow.LEFT) - left == (within_s < 1)
    assert ("closed with work under way" in capsys.readouterr().out) == (within_s < 1)
    assert bool(times.any()) == (within_s > 1)
    del step.pool, step.worker, step.models
    gc.collect()
    assert arrives(late, expected)
