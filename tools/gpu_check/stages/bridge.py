"""Jobs of the host from a stream, by the driver alone: eager, captured, and with workers that are late or fail."""

import ctypes
import queue
import threading
from functools import partial
from typing import Any

from umbra.ops.bridge.calls import DONE, SUBMIT, BridgeError, BridgeJob
from umbra.ops.cuda.bridge import GpuBridge
from umbra.tools.gpu_check.device import is_fake, opened
from umbra.tools.npu_check.outcome import Check, Passed

LAYERS, COUNT, REPLAYS, FAKE_REPLAYS = 8, 64, 200, 5
LIMIT_S, LATE_S = 10.0, 0.3


def checks() -> list[Check]:
    cases = []
    for doorbell, way in ((False, "host function"), (True, "doorbell")):
        cases += [
            Check(f"eager, {way}", partial(steps, doorbell, False)),
            Check(f"captured, {way}", partial(steps, doorbell, True)),
            Check(f"refused, {way}", partial(failing, doorbell, "refuses", "the shadow pool refused the job")),
            Check(f"failed, {way}", partial(failing, doorbell, "fails", "the shadow pool failed")),
            Check(f"late, {way}", partial(failing, doorbell, "waits", "the shadow pool was not done within 300 ms")),
        ]
    return cases


class Doubler:
    """A shadow pool of one thread, whose sums are twice x plus the layer."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.refuses = self.fails = False
        self.jobs: queue.Queue[Any] = queue.Queue()
        self.function = SUBMIT(self._submit)
        self.submit = ctypes.cast(self.function, ctypes.c_void_p).value or 0
        threading.Thread(target=self._work, daemon=True).start()

    def _submit(self, context: int, job: Any) -> int:
        if not self.refuses:
            self.jobs.put(job)
        return int(self.refuses)

    def _work(self) -> None:
        while True:
            job = self.jobs.get()
            self.gate.wait()
            given = job.contents
            x, sums = (floats(address) for address in (given.x, given.sums))
            for i in range(COUNT):
                sums[i] = 2 * x[i] + given.layer
            DONE(given.done)(job, int(self.fails))


def floats(address: int) -> Any:
    return (ctypes.c_float * COUNT).from_address(address)


class Chain:
    """A step of LAYERS layers, each of which takes the sums of the one before it."""

    def __init__(self, doorbell: bool, limit_s: float):
        self.driver, self.worker, size = opened(), Doubler(), 4 * COUNT
        self.bridge = GpuBridge(self.worker.submit, 0, limit_s, doorbell)
        self.main, self.side = self.driver.stream(), self.driver.stream()
        self.fork, self.back, self.end = (self.driver.event() for _ in range(3))
        self.there, self.given, self.taken = (
            self.driver.allocate(size),
            self.driver.pinned(size),
            self.driver.pinned(size),
        )
        self.buffers = [(self.driver.pinned(size), self.driver.pinned(size)) for _ in range(LAYERS)]
        self.payloads = [
            self.bridge.payload(BridgeJob(x, 0, 0, 0, sums, 1, 1, COUNT, layer, -1, None), size)
            for layer, (x, sums) in enumerate(self.buffers)
        ]

    def enqueue(self) -> None:
        driver, size = self.driver, 4 * COUNT
        driver.cuMemcpyAsync(self.there, self.given, size, self.main)
        for (x, sums), payload in zip(self.buffers, self.payloads, strict=True):
            stream = self.main
            if not self.bridge.doorbell:
                driver.cuEventRecord(self.fork, self.main)
                driver.cuStreamWaitEvent(self.side, self.fork, 0)
                stream = self.side
            driver.cuMemcpyAsync(x, self.there, size, stream)
            self.bridge.launch(stream, payload)
            if self.bridge.doorbell:
                self.bridge.wait_for_answer(self.main)
            else:
                driver.cuEventRecord(self.back, self.side)
                driver.cuStreamWaitEvent(self.main, self.back, 0)
            driver.cuMemcpyAsync(self.there, sums, size, self.main)
        driver.cuMemcpyAsync(self.taken, self.there, size, self.main)

    def wait(self) -> None:
        self.driver.cuEventRecord(self.end, self.main)
        if not self.bridge.happened(self.end, int(2000 * LIMIT_S)):
            raise RuntimeError("the stream did not end")

    def close(self) -> None:
        self.worker.gate.set()
        if not self.bridge.close(LIMIT_S):
            raise RuntimeError("the bridge did not close")


def steps(doorbell: bool, captured: bool) -> Passed:
    chain = Chain(doorbell, LIMIT_S)
    nodes = 0
    if captured:
        with chain.driver.captured(chain.main) as graph:
            chain.enqueue()
        nodes = graph.nodes
    for step in range((FAKE_REPLAYS if is_fake() else REPLAYS) if captured else 3):
        given, taken = floats(chain.given), floats(chain.taken)
        given[:] = [float(step % 7 + i) for i in range(COUNT)]
        chain.bridge.begin(step)
        graph.launch(chain.main) if captured else chain.enqueue()
        chain.wait()
        chain.bridge.check()
        right = list(given)
        for layer in range(LAYERS):
            right = [2 * value + layer for value in right]
        if list(taken) != right:
            raise RuntimeError(f"step {step}: {list(taken)[:3]} in place of {right[:3]}")
    chain.close()
    return Passed(f"{nodes} nodes" if captured else "")


def failing(doorbell: bool, how: str, text: str) -> Passed:
    """The stream goes on with NaN, the error names layer and step, and the bridge closes."""
    chain = Chain(doorbell, LATE_S)
    if how == "waits":
        chain.worker.gate.clear()
    else:
        setattr(chain.worker, how, True)
    chain.bridge.begin(5)
    chain.enqueue()
    chain.wait()
    try:
        chain.bridge.check()
    except BridgeError as error:
        if str(error) != f"layer 0, step 5: {text}":
            raise
    else:
        raise RuntimeError("no error was raised")
    if floats(chain.taken)[0] == floats(chain.taken)[0]:
        raise RuntimeError("the sums are not NaN")
    chain.close()
    return Passed(text)
