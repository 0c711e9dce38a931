"""The shadow pool as a bridge's worker, called through its C function, as the bridge calls it."""

import ctypes
import functools
import gc
import queue
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.cpu.test_shadow import KINDS, MANY, Model, cpu, heavy, routing, teams
from umbra.ops.bridge.calls import DONE, SUBMIT, BridgeJob
from umbra.ops.cpu import engine, shadow
from umbra.ops.formats import FORMATS

TYPES = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    engine.start(1, "auto")


@pytest.fixture(params=[(1,), (2, 1)], ids=["1", "2+1"])
def pool(request: pytest.FixtureRequest) -> shadow.ShadowPool:
    return shadow.ShadowPool(teams(*request.param))


class Caller:
    """One payload of a bridge: its buffers and its job."""

    def __init__(self, worker: shadow.BridgeWorker, model: Model, tokens: int, top_k: int, dtype: torch.dtype):
        self.worker, self.model, hidden = worker, model, model.blocks.hidden
        worker.layer(model.layer, tokens, top_k, dtype)
        self.x, self.sums = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(tokens, hidden, dtype=dtype)
        self.ids, self.weights = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, top_k, dtype=dtype)
        self.places = torch.full((len(model.layer.store),), -1, dtype=torch.int32)
        self.told: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.done = DONE(lambda _, failed: self.told.put(failed))
        buffers = self.x, self.ids, self.weights, self.places, self.sums
        done = ctypes.cast(self.done, ctypes.c_void_p)
        self.job = BridgeJob(*(t.data_ptr() for t in buffers), tokens, top_k, hidden, model.layer.number, 0, done)

    def fill(self, seed: int) -> None:
        random = torch.manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, generator=random))
        tokens, top_k = self.ids.shape
        weights, ids = routing(tokens, top_k, len(self.places))
        self.weights.copy_(weights)
        self.ids.copy_(ids)

    def make_resident(self, resident: list[int]) -> None:
        """Draws the experts' places: their values do not matter, only whether they are below 0."""
        for expert in range(len(self.places)):
            self.places[expert] = random.choice([0, 7, 2**31 - 1] if expert in resident else [-1, -7, -(2**31)])

    def submit(self) -> int:
        self.sums.fill_(torch.nan)
        return int(SUBMIT(self.worker.submit)(self.worker.context, ctypes.byref(self.job)))

    def run(self) -> int:
        """Submits the job and returns whether it failed."""
        assert self.submit() == 0
        return self.told.get(timeout=300)

    def here(self) -> Tensor:
        """(tokens, top_k) pairs that count."""
        e = self.ids - self.model.first
        return (e >= 0) & (e < len(self.places)) & (self.worker.live[len(self.ids)] > 0)[:, None]

    def missing(self) -> Tensor:
        e = self.ids - self.model.first
        return self.here() & (self.places[e.clamp(0, len(self.places) - 1)] < 0)

    def expected(self) -> Tensor:
        ids = self.ids.long().where(self.missing(), -1)
        sums = cpu.moe(self.x.float(), self.weights.float(), ids, self.model.experts, self.model.first)
        return sums.to(self.x.dtype)

    def routed(self) -> Tensor:
        return (self.ids - self.model.first)[self.here()].bincount(minlength=len(self.places))

    def check(self) -> None:
        counts, hits, times = self.model.layer.counts, self.model.layer.hits, self.model.layer.times
        before, hits_before = counts.clone(), hits.clone()
        times.fill_(-1)
        assert self.run() == 0
        assert torch.equal(self.sums, self.expected())
        assert torch.equal(counts - before, self.routed())
        assert hits - hits_before == (self.here() & ~self.missing()).sum()
        began, ended, *rest = times.tolist()
        assert 0 < began <= ended if self.missing().any() else began == ended == 0
        assert rest == [0, 0]


@functools.cache
def models(format: Any, first: int) -> list[Model]:
    """Two layers' experts, 8 each from `first` on."""
    torch.manual_seed(first)
    models = [Model(format, first=first) for _ in range(2)]
    models[1].layer = replace(models[1].layer, number=4)
    return models


@functools.cache
def lasting() -> shadow.BridgeWorker:
    return shadow.BridgeWorker(shadow.ShadowPool(teams(2, 1)))


@given(
    st.sampled_from(list(KINDS.values())),
    st.sampled_from(TYPES),
    st.sampled_from([0, 2, 100]),
    st.integers(0, 1),
    st.data(),
    st.lists(st.integers(0, 7), unique=True),
    st.sampled_from([1, 2, 7, 9, 40]),
    st.integers(1, 8),
)
def test_any_job(
    format: Any,
    dtype: torch.dtype,
    first: int,
    layer: int,
    data: st.DataObject,
    resident: list[int],
    tokens: int,
    top_k: int,
) -> None:
    """Two layers share scratch memory. Ids may be those of other experts, negative, or repeated in a token; some rows
    are padding."""
    worker = lasting()
    caller = Caller(worker, models(format, first)[layer], tokens, top_k, dtype)
    caller.fill(tokens)
    one = st.one_of(st.integers(first - 2, first + 10), st.sampled_from([-1, 0, -(2**31), 2**31 - 1]))
    ids = data.draw(st.lists(one, min_size=tokens * top_k, max_size=tokens * top_k))
    caller.ids.copy_(torch.tensor(ids).view(tokens, top_k))
    caller.make_resident(resident)
    worker.live[tokens].copy_(torch.arange(tokens) < data.draw(st.integers(1, tokens)))
    caller.check()


def test_where_nothing_is_missing_the_pool_is_not_asked(pool: shadow.ShadowPool) -> None:
    """So not even a stopped one is an error."""
    caller = Caller(shadow.BridgeWorker(pool), models(FORMATS["q4"], 2)[0], 5, 3, torch.bfloat16)
    caller.fill(0)
    caller.make_resident(list(range(8)))
    for _ in range(2):
        assert caller.submit() == 0
        assert not caller.told.empty()  # told from within
        assert caller.told.get() == 0
        assert torch.equal(caller.sums, torch.zeros_like(caller.sums))
        assert caller.model.layer.times.tolist() == [0, 0, 0, 0]
        pool.stop()


def test_a_stopped_pool_fails_each_job_once() -> None:
    """The pool ends the job that it has begun, although the stop comes meanwhile."""
    model = heavy()[0]
    pool = shadow.ShadowPool(teams(1))
    worker = shadow.BridgeWorker(pool)
    caller = Caller(worker, model, MANY // 2, 8, torch.bfloat16)
    caller.fill(0)
    assert caller.submit() == 0
    pool.stop()
    assert caller.told.get(timeout=300) == 0
    assert torch.equal(caller.sums, caller.expected())
    for _ in range(3):
        assert caller.run() == 1
    assert caller.model.layer.times.tolist() == [0, 0, 0, 0]
    del worker, pool, caller.worker
    gc.collect()
    assert caller.told.empty()


def test_an_expert_that_is_nowhere_fails(pool: shadow.ShadowPool) -> None:
    model = Model(FORMATS["q8"])
    model.layer.store[5] = 0
    caller = Caller(shadow.BridgeWorker(pool), model, 1, 2, torch.float16)
    caller.ids.copy_(torch.tensor([[5, 2]]))
    assert caller.run() == 1
    caller.make_resident([5])
    caller.check()


def test_jobs_of_another_shape_are_refused(pool: shadow.ShadowPool) -> None:
    caller = Caller(shadow.BridgeWorker(pool), models(FORMATS["q8"], 0)[0], 4, 2, torch.float32)
    for name, wrong in {"tokens": 3, "top_k": 1, "hidden": 64, "layer": 9}.items():
        right = getattr(caller.job, name)
        setattr(caller.job, name, wrong)
        assert caller.submit() == 1
        setattr(caller.job, name, right)
    assert caller.told.empty()
    caller.check()
