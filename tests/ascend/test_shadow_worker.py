"""A step on the fake NPU, with missing experts computed by a real shadow pool: bridge and native worker together."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ops.ascend.shadow import ShadowNodes
from ops.cpu import engine
from ops.cpu.shadow import ShadowPool, Worker
from ops.format import FORMATS
from tests.ascend.log import device_log, forget_streams
from tests.ops.cpu.test_shadow import Model, cpu, routing, teams

LAYERS, E, K, FIRST, CANN = 2, 8, 3, 2, ["8.3.RC1", "9.1.0"]


class Step:
    """Two layers with the same x and routing. Sigmoid stands for the resident experts."""

    def __init__(self, tokens: int, dtype: torch.dtype, cann: str):
        engine.start(1, "auto")
        torch.manual_seed(0)
        self.models = [Model(FORMATS["q4"], E, 64, first=FIRST) for _ in range(LAYERS)]
        self.slots = torch.zeros(LAYERS, E, dtype=torch.int64)
        self.pool = ShadowPool(teams(1), timeout=0.001)
        self.worker = Worker(self.pool)
        for number, model in enumerate(self.models):
            model.layer = replace(model.layer, number=number)
            self.worker.layer(model.layer, tokens, K, dtype)
        hidden = self.models[0].blocks.hidden
        slots = dict(enumerate(self.slots))
        self.nodes = ShadowNodes(self.worker.submit, self.worker.context, slots, hidden, K, dtype, 30, cann)
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
        tokens, top_k = ids.shape
        for to, value in zip((weights, ids), routing(tokens, top_k, E), strict=True):
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

    def step(cann: str, dtype: torch.dtype) -> Step:
        made.append(Step(5, dtype, cann))
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
