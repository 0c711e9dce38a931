"""A GPU's side of shadow experts on CPU tensors: jobs go straight to the shadow pool, copies end when a test says."""

import ctypes
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from umbra.executor.config.env import RankEnv
from umbra.executor.platform.cuda import shadow_device
from umbra.executor.platform.cuda.device import CudaPlatform
from umbra.executor.platform.settings import PlatformSettings
from umbra.ops.bridge.calls import DONE, SUBMIT, BridgeJob
from umbra.ops.cpu.shadow import BridgeWorker, Pieces
from umbra.ops.cuda.shadow import GpuNodes


class GpuOfTensors(CudaPlatform):
    """Platform cuda without a GPU, for cases with shadow experts."""

    def __init__(self, settings: PlatformSettings, ranks: RankEnv):
        super().__init__(settings, ranks, "cpu", kernels=False)

    def copy_ms(self, nbytes: int) -> float:
        return 0.01


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> list["FakeNodes"]:
    """Puts the fakes into the platform. -> the nodes of the devices that are opened from now on"""
    opened: list[FakeNodes] = []

    def nodes(*given: Any) -> FakeNodes:
        opened.append(FakeNodes(*given))
        return opened[-1]

    monkeypatch.setattr(shadow_device, "GpuNodes", nodes)
    monkeypatch.setattr(shadow_device, "GpuCopies", FakeCopies)
    monkeypatch.setattr(shadow_device, "RegisteredRange", FakeRange)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    return opened


class FakeNodes:
    how = "experts on the CPU are called by a test"

    def __init__(
        self,
        worker: BridgeWorker,
        layers: list[int],
        experts: int,
        hidden: int,
        top_k: int,
        dtype: torch.dtype,
        captured: int,
        timeout_s: float,
    ):
        self.function, self.context, self.timeout_s = SUBMIT(worker.submit), worker.context, timeout_s
        self.dtype, self.bridge, self.step, self.captured = dtype, self, -1, captured
        self.ended, self.failed = threading.Event(), False
        self.done = DONE(self._done)
        self.sizes: set[int] = set()
        self.jobs = 0

    def _done(self, job: Any, failed: int) -> None:
        self.failed = bool(failed)
        self.ended.set()

    def size_of(self, tokens: int) -> int:
        return GpuNodes.size_of(self, tokens)  # type: ignore[arg-type]

    def prepare(self, size: int) -> None:
        self.sizes.add(size)

    def begin(self, step: int, tokens: int) -> None:
        assert self.size_of(tokens) in self.sizes
        self.step = step

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, layer: int) -> Tensor:
        here = places.clone()
        size, missing = self.size_of(len(x)), here.clamp(max=0).to(torch.int32)
        rows = [torch.full((size, *of.shape[1:]), 5, dtype=of.dtype) for of in (x, ids, weights)]  # padding is not read
        for to, of in zip(rows, (x, ids, weights), strict=True):
            to[: len(of)] = of
        given = rows[0], rows[1].to(torch.int32), rows[2].to(self.dtype), missing
        self.given, self.sums = given, torch.full_like(rows[0], torch.nan)
        addresses = [tensor.data_ptr() for tensor in (*given, self.sums)]
        self.ended.clear()
        done = ctypes.cast(self.done, ctypes.c_void_p)
        self.job = BridgeJob(*addresses, size, ids.shape[1], x.shape[1], layer, self.step, done)
        assert not self.function(self.context, ctypes.byref(self.job))
        return here

    def join(self, own: Tensor, layer: int) -> Tensor:
        assert self.ended.wait(self.timeout_s)
        assert not self.failed
        self.jobs += 1
        return own + self.sums[: len(own)]

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeCopies:
    """Copies whose bytes and place are written at once, and that end at the second question."""

    def __init__(self, bridge: FakeNodes):
        self.asked: list[int] = []
        self.streamed = 0  # blocks that were copied without a place

    def begin(self, to: int, source: Pieces, entry: int, value: int) -> int:
        self.send(to, source, FakeStream())
        self.streamed -= 1
        ctypes.c_int64.from_address(entry).value = value
        self.asked.append(0)
        return len(self.asked) - 1

    def send(self, to: int, source: Pieces, stream: "FakeStream") -> None:
        for offset, start, nbytes in source.pieces:
            ctypes.memmove(to + offset, source.address + start, nbytes)
        self.streamed += 1

    def done(self, ticket: int) -> bool:
        self.asked[ticket] += 1
        return self.asked[ticket] > 1

    def wait(self, ticket: int) -> None:
        pass


class FakeEvent:
    """Work of a stream is done as it is begun, so an event has happened once it is recorded."""

    def __init__(self, enable_timing: bool = False):
        self.timed, self.recorded = enable_timing, False

    def record(self, stream: "FakeStream | None" = None) -> None:
        self.recorded = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.timed
        assert end.timed
        assert self.recorded
        assert end.recorded
        return 0.02


class FakeStream:
    def wait_stream(self, other: "FakeStream") -> None:
        pass

    def wait_event(self, event: FakeEvent) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeRange:
    def __init__(self, address: int, nbytes: int, what: str):
        assert address % 64 == 0
        assert nbytes > 0

    def end(self) -> None:
        pass
