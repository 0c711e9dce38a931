"""Rates of the link and of memory."""

import ctypes
import mmap
import random
import time
from collections.abc import Callable

from umbra.ops.cuda.host_memory import RegisteredRange
from umbra.tools.gpu_check.device import is_fake, opened, time_ms, torch_gpu
from umbra.tools.npu_check.outcome import Check, Passed

GIB, MIB = 1 << 30, 1 << 20
PINNED_SHARE = 0.8  # of the rate of pinned memory that registered memory must reach


def checks() -> list[Check]:
    return [Check("copies", copies), Check("registration", registration), Check("memory of the GPU", own_memory)]


def gbps(nbytes: int, work: Callable[[int], None]) -> float:
    return round(nbytes / max(time_ms(work), 1e-6) / 1e6, 2)


class Anonymous:
    """Filled anonymous memory of the host."""

    def __init__(self, nbytes: int, huge: bool):
        self.map = mmap.mmap(-1, nbytes)
        self.map.madvise(mmap.MADV_HUGEPAGE if huge else 15)  # MADV_NOHUGEPAGE
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        ctypes.memset(self.address, 1, nbytes)


def copies() -> Passed:
    driver, size = opened(), MIB if is_fake() else GIB // 2
    there, pinned = driver.allocate(size), driver.pinned(size)
    memory = Anonymous(size, huge=True)
    measured = {
        "pageable to GPU GB/s": gbps(size, lambda s: driver.cuMemcpyAsync(there, memory.address, size, s)),
        "pinned to GPU GB/s": gbps(size, lambda s: driver.cuMemcpyAsync(there, pinned, size, s)),
        "GPU to pinned GB/s": gbps(size, lambda s: driver.cuMemcpyAsync(pinned, there, size, s)),
    }
    registered = RegisteredRange(memory.address, size, "copies")
    measured["registered to GPU GB/s"] = rate = gbps(
        size, lambda s: driver.cuMemcpyAsync(there, memory.address, size, s)
    )
    draw = random.Random(0)
    for nbytes in (64 << 10, MIB, 10 * MIB):
        count = max(min(size // nbytes, 64), 1)
        starts = [draw.randrange(max(size - nbytes, 1)) // 4096 * 4096 for _ in range(count)]

        def some(stream: int, nbytes: int = min(nbytes, size), starts: list[int] = starts) -> None:
            for start in starts:
                driver.cuMemcpyAsync(there, memory.address + start, nbytes, stream)

        measured[f"registered, pieces of {nbytes >> 10} KiB, GB/s"] = gbps(count * min(nbytes, size), some)
    registered.end()
    if not is_fake() and rate < PINNED_SHARE * measured["pinned to GPU GB/s"]:
        raise RuntimeError(f"registered memory is slow: {measured}")
    return Passed(f"{rate} GB/s from registered memory", measured)


def registration() -> Passed:
    opened()
    measured = {}
    for name, huge, size in (("huge pages", True, 4 * GIB), ("pages of 4 KiB", False, GIB)):
        size = 8 * MIB if is_fake() else size
        memory = Anonymous(size, huge)
        begun = time.perf_counter()
        registered = RegisteredRange(memory.address, size, name)
        took, begun = time.perf_counter() - begun, time.perf_counter()
        registered.end()
        measured[f"register {name} GB/s"] = round(size / took / 1e9, 2)
        measured[f"unregister {name} GB/s"] = round(size / (time.perf_counter() - begun) / 1e9, 2)
    return Passed(f"{measured['register huge pages GB/s']} GB/s", measured)


def own_memory() -> Passed:
    torch_gpu()
    import torch

    driver, size = opened(), 4 * GIB
    one, other = (driver.allocate(size) for _ in range(2))
    measured = {
        "copy within GB/s, read and written": gbps(2 * size, lambda s: driver.cuMemcpyAsync(other, one, size, s))
    }
    driver.cuMemFree_v2(one)
    driver.cuMemFree_v2(other)
    words = torch.ones(size // 4, dtype=torch.int32, device="cuda").view(-1, 1 << 20)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        begin.record()
        words.amax(1)
        end.record()
        end.synchronize()
    measured["read GB/s"] = round(size / begin.elapsed_time(end) / 1e6, 1)
    return Passed(f"{measured['read GB/s']} GB/s read", measured)
