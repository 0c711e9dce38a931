"""Stage 7: calls of the host from a stream, eager and captured, and a host that is late."""

import ctypes
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_npu
from torch import Tensor
from torch_npu.npu.utils import get_cann_version

from umbra.executor.platform.ascend.environment import cann_home
from umbra.executor.platform.ascend.versions import read_versions
from umbra.ops.ascend.shadow import ShadowNodes
from umbra.ops.bridge.calls import DONE, SUBMIT, BridgeError
from umbra.tools.npu_check.numbers import Differs, require
from umbra.tools.npu_check.outcome import Check, Passed

NPU = torch.device("npu")
TOKENS, TOP_K, HIDDEN, EXPERTS, LAYERS = 3, 2, 64, 4, 2
STEPS = 5
LIMIT_S = 10.0  # that a step waits for its callbacks
LATE_S = 0.5  # the same, where the host is late on purpose


def checks(logs: Path) -> list[Check]:
    return [Check("eager", eager), Check("captured and replayed", captured), Check("a late host", late)]


class HostThread:
    """Takes the place of the shadow pool: a thread gives each token x times the sum of its weights, plus its ids and
    all places."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.jobs: queue.Queue[Any] = queue.Queue()
        self.calls = 0
        self.function = SUBMIT(self._submit)
        self.submit = ctypes.cast(self.function, ctypes.c_void_p).value or 0
        threading.Thread(target=self._work, daemon=True).start()

    def _submit(self, context: int, job: Any) -> int:
        self.jobs.put(job)
        return 0

    def _work(self) -> None:
        while True:
            job = self.jobs.get()
            self.gate.wait()
            given = job.contents
            x = _array(given.x, ctypes.c_float, given.tokens, given.hidden)
            weights = _array(given.weights, ctypes.c_float, given.tokens, given.top_k)
            ids = _array(given.ids, ctypes.c_int32, given.tokens, given.top_k)
            sums = _array(given.sums, ctypes.c_float, given.tokens, given.hidden)
            places = _array(given.places, ctypes.c_int32, 1, EXPERTS)
            sums[:] = x * weights.sum(1, keepdims=True) + ids.sum(1, keepdims=True) + places.sum()
            self.calls += 1
            DONE(given.done)(job, 0)


def _array(address: int, kind: Any, rows: int, columns: int) -> Any:
    return np.ctypeslib.as_array((kind * (rows * columns)).from_address(address)).reshape(rows, columns)


class BridgeStep:
    """LAYERS layers with the same inputs; each gives its own sums and, in `out`, these plus x."""

    def __init__(self, timeout_s: float):
        self.host = HostThread()
        cann = read_versions(cann_home(), get_cann_version() or None).cann
        self.nodes = ShadowNodes(
            self.host.submit, 0, range(LAYERS), EXPERTS, HIDDEN, TOP_K, torch.float32, timeout_s, cann
        )
        self.nodes.prepare(TOKENS)
        self.x, self.weights = torch.zeros(TOKENS, HIDDEN, device=NPU), torch.zeros(TOKENS, TOP_K, device=NPU)
        self.ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int32, device=NPU)
        self.places = torch.zeros(EXPERTS, dtype=torch.int32, device=NPU)

    def fill(self, seed: int) -> Tensor:
        """New inputs; returns the sums that are right."""
        torch.manual_seed(seed)
        x, weights, ids = torch.rand(TOKENS, HIDDEN), torch.rand(TOKENS, TOP_K), torch.randint(EXPERTS, (TOKENS, TOP_K))
        places = torch.randint(-9, 9, (EXPERTS,))
        given = (self.x, x), (self.weights, weights), (self.ids, ids.int()), (self.places, places.int())
        for there, here in given:
            there.copy_(here)
        return x * weights.sum(1, keepdim=True) + ids.sum(1, keepdim=True) + places.sum()

    def run(self) -> list[Tensor]:
        results, number = [], self.nodes.number
        for layer in range(LAYERS):
            sums, _ = torch.ops.umbra.shadow_submit(self.x, self.ids, self.weights, self.places, layer, number)
            results.append(torch.ops.umbra.shadow_join(sums, self.x, layer, number))
        return results

    def check(self, number: int, run: Callable[[], list[Tensor]]) -> None:
        right = self.fill(number)
        self.nodes.begin(number, TOKENS)
        results = run()
        self.nodes.finish()
        for layer, result in enumerate(results):
            require(f"step {number}, layer {layer}: what the host returned", result, right + self.x.cpu(), 1e-5)


def eager() -> Passed:
    step = BridgeStep(LIMIT_S)
    try:
        for number in range(STEPS):
            step.check(number, step.run)
    finally:
        step.nodes.close()
    return Passed(step.nodes.bridge.how)


def captured() -> Passed:
    """Captured once, replayed with other inputs; the capture itself must not call the host."""
    step = BridgeStep(LIMIT_S)
    try:
        graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(graph):
            results = step.run()
        if step.host.calls:
            raise RuntimeError("the capture called the host")

        def replay() -> list[Tensor]:
            graph.replay()
            return results

        for number in range(STEPS):
            step.check(number, replay)
    finally:
        step.nodes.close()
    return Passed(step.nodes.bridge.how)


def late() -> Passed:
    """The step ends with an error, not a hang, and the stream goes on."""
    step = BridgeStep(LATE_S)
    step.host.gate.clear()
    try:
        step.fill(0)
        step.nodes.begin(0, TOKENS)
        results = step.run()
        try:
            step.nodes.finish()
        except BridgeError as error:
            text = str(error)
        else:
            raise RuntimeError("a host that was late raised no error")
        torch_npu.npu.synchronize()
        if not torch.isnan(results[0]).all():
            raise Differs("the sums of a late host are not NaN: the step differs from what it should be")
    finally:
        step.host.gate.set()
        step.nodes.close()
    return Passed(text)
