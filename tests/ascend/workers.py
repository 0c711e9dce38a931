"""A shadow pool for tests of the bridge, and a step of two layers that uses it."""

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tests.ascend.log import forget_streams, ran
from umbra.ops.ascend.shadow import ShadowNodes
from umbra.ops.bridge.calls import DONE, SUBMIT, BridgeJob
from umbra.ops.cpu.shadow import BridgeWorker, ShadowPool

T, K, H, E, LAYERS = 3, 2, 8, 4, 2
FAKE = ctypes.CDLL("libfake_cann.so")


def array(address: int, kind: Any, *shape: int) -> Any:
    return np.ctypeslib.as_array((kind * int(np.prod(shape))).from_address(address)).reshape(shape)


class Workers:
    """A shadow pool of one thread, which waits for `gate`. A token's sum: x * weight + id + place, of each id."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.seen: list[tuple[int, int, float]] = []  # layer, step and first value of each job
        self.refuse = self.fails = self.hangs = False
        self.jobs: queue.Queue[Any] = queue.Queue()
        self.function = SUBMIT(self._submit)
        self.submit = ctypes.cast(self.function, ctypes.c_void_p).value or 0
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _submit(self, context: int, job: Any) -> int:
        if self.hangs:
            self.gate.wait()
        if not self.refuse:
            self.jobs.put(job)
        return int(self.refuse)

    def _work(self) -> None:
        while job := self.jobs.get():
            self.gate.wait()
            j = job.contents
            x, ids = array(j.x, ctypes.c_float, j.tokens, j.hidden), array(j.ids, ctypes.c_int32, j.tokens, j.top_k)
            weights, places = array(j.weights, ctypes.c_float, j.tokens, j.top_k), array(j.places, ctypes.c_int32, E)
            sums = array(j.sums, ctypes.c_float, j.tokens, j.hidden)
            sums[:] = x * weights.sum(1, keepdims=True) + (ids + places[ids]).sum(1, keepdims=True)
            self.seen.append((j.layer, j.step, float(x[0, 0])))
            DONE(j.done)(job, int(self.fails))


class Gate:
    """Holds back what `stream` is given after `shut`, such as a copy, until `open`. Threads of its own wait."""

    def __init__(self, stream: int):
        self.opened, self.ended, self.stream = threading.Event(), False, stream
        self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: bool(self.opened.wait()))
        self.thread = threading.Thread(target=self._report, daemon=True)
        self.thread.start()
        assert not FAKE.aclrtSubscribeReport(ctypes.c_uint64(self.thread.ident or 0), ctypes.c_void_p(stream))

    def _report(self) -> None:
        while not self.ended:
            FAKE.aclrtProcessReport(10)

    def shut(self) -> None:
        self.opened.clear()
        assert not FAKE.aclrtLaunchCallback(self.function, None, 1, ctypes.c_void_p(self.stream))

    def open(self) -> None:
        self.opened.set()

    def end(self) -> None:
        self.opened.set()
        self.ended = True
        self.thread.join()


class WatchedWorker(BridgeWorker):
    """Calls `watch` with each job that is submitted."""

    watch: ClassVar[Callable[[BridgeJob], None]]

    def __init__(self, pool: ShadowPool):
        super().__init__(pool)
        submit = SUBMIT(self.submit)

        def watched(context: int, job: Any) -> int:
            type(self).watch(job.contents)
            return int(submit(context, job))

        self.function = SUBMIT(watched)
        self.submit = ctypes.cast(self.function, ctypes.c_void_p).value or 0


class Inputs:
    def __init__(self) -> None:
        self.x, self.ids = torch.zeros(T, H).npu(), torch.zeros(T, K, dtype=torch.int32).npu()
        self.weights, self.own = torch.zeros(T, K).npu(), torch.zeros(T, H).npu()
        self.places, self.sums = torch.zeros(LAYERS, E, dtype=torch.int32).npu(), list[Tensor]()

    def fill(self, seed: int) -> list[Tensor]:
        """Fills the inputs and returns the sums that the workers must give, for each layer."""
        random = torch.Generator().manual_seed(seed)
        x, weights = torch.rand(T, H, generator=random), torch.rand(T, K, generator=random)
        ids = torch.randint(0, E, (T, K), generator=random, dtype=torch.int32)
        places = torch.randint(-9, 9, (LAYERS, E), generator=random, dtype=torch.int32)
        for there, here in ((self.x, x), (self.ids, ids), (self.weights, weights), (self.places, places)):
            there.copy_(here)
        part = x * weights.sum(1, keepdim=True)
        return [part + (ids + row[ids.long()]).sum(1, keepdim=True) for row in places]

    def step(self, nodes: ShadowNodes) -> None:
        """Sigmoid takes the place of the resident experts; the Add is in `join`."""
        self.sums = []
        for layer in range(LAYERS):
            self.sums.append(nodes.submit(self.x, self.ids, self.weights, self.places[layer], layer)[0])
            self.x.sigmoid()
            nodes.join(self.sums[-1], self.own, layer)


def until(lines: list[tuple[int, str]], last: str) -> list[tuple[int, str]]:
    """Extends `lines` by what streams execute until a line contains `last`."""
    deadline = time.monotonic() + 120
    while not any(last in line for _, line in lines):
        assert time.monotonic() < deadline, lines
        lines += ran()
        time.sleep(0.001)
    return lines


def close_nodes() -> None:
    """Closes the nodes of runners that a test made, because a stream reports to one thread only."""
    for nodes in list(ShadowNodes.alive.values()):
        nodes.close()
    forget_streams()
