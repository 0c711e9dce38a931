"""Reads the fake CANN's log: the calls to the device, in order.

with device_log() as log:
    step()
assert log.kernels() == ["aclnnMatmul", ...]
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_fake = ctypes.CDLL("libfake_cann.so")
for _name in ("fake_log_take", "fake_ran_take", "fake_given_take", "fake_violations_take"):
    getattr(_fake, _name).restype = ctypes.c_char_p
_fake.fake_most_pinned.argtypes = _fake.fake_most_registered.argtypes = [ctypes.c_size_t]
_fake.fake_registered.restype = ctypes.c_size_t
forget_streams = _fake.fake_streams_forget  # for tests that leave a stream waiting for ever
_fake.fake_fail.argtypes = [ctypes.c_int64]
_fake.fake_calls.restype = ctypes.c_int64
fail_call = _fake.fake_fail  # the n-th call from now on that allocates, copies, launches or waits; 0: none
device_calls = _fake.fake_calls  # such calls since then
most_pinned = _fake.fake_most_pinned  # bytes that one allocation of pinned memory may have
most_registered = _fake.fake_most_registered  # bytes of registered memory that there may be
registered = _fake.fake_registered  # bytes that there are


def violations() -> list[str]:
    """The rules of host functions and captures that were broken since the last call."""
    return _fake.fake_violations_take().decode().splitlines()


def ran() -> list[tuple[int, str]]:
    """(stream, line): what streams have executed, in order, since `device_log` began or the last call. Lines are those
    of launches, `callback begin` and `callback end`."""
    pairs = (line.split(" ", 1) for line in _fake.fake_ran_take().decode().splitlines())
    return [(int(stream), line) for stream, line in pairs]


class DeviceLog:
    """Filled when its `with` block ends. A line is one of the following. Tasks of a stream may begin with "captured "
    (inside a graph capture) or "update " (changing a captured graph):

        aclnnAdd (2,3)float32 (3)float32 scalar:int64 (2,3)float32  tensors in order, results last; :NZ, @strides(..)
                                                                    our own operators' attributes also: `true`, 96
        aclop Name                                                  compiled operator
        memcpy D2H 24, memcpy async D2H 24, memset 24               bytes
        host function                                               that a stream calls
        synchronize stream, synchronize device, synchronize event
        capture begin graph 1, capture end graph 1, replay graph 1
        task group begin, task group end, task update begin, task update end
        hccl open name=N ranks=2 rank=0 buffer=400 expansion=3 deterministic=unset
        hccl AllReduce 64 bfloat16 name=N ranks=2
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.given: list[str] = []  # for tests/ascend/clock.py

    def kernels(self) -> list[str]:
        """Names of the kernels launched, captured ones too."""
        words = (line.removeprefix("captured ").removeprefix("update ").split() for line in self.lines)
        return [line[0] if line[0] != "aclop" else line[1] for line in words if line[0].startswith("acl")]

    def waits(self) -> list[str]:
        """The lines that make the host wait for the device: synchronisations, and copies that are not asynchronous."""
        return [line for line in self.lines if line.startswith(("synchronize", "memcpy D2H", "memcpy H2D"))]

    def find(self, word: str) -> list[str]:
        return [line for line in self.lines if word in line]


@contextmanager
def device_log() -> Iterator[DeviceLog]:
    """Logs all calls to the device within the block, including launches still in torch_npu's queue at its end."""
    log = DeviceLog()
    torch.npu.synchronize()
    _fake.fake_log_start()
    try:
        yield log
        torch.npu.synchronize()
    finally:
        lines, log.given = (take().decode().splitlines() for take in (_fake.fake_log_take, _fake.fake_given_take))
    assert lines[-1] == "synchronize device", lines[-3:]
    log.lines = lines[:-1]
