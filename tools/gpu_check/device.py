"""The driver as the stages use it, and times of what a stream does."""

import functools
import statistics
from collections.abc import Callable

from umbra.ops.cuda.driver import Driver
from umbra.tools.npu_check.outcome import Skipped


@functools.cache
def opened() -> Driver:
    """The driver, with the first device's context current in this thread."""
    driver = Driver()
    driver.open()
    return driver


def is_fake() -> bool:
    """Returns whether the driver is the fake of the tests, for which sizes are small."""
    return hasattr(opened().library, "fake_cuda_kill")


def torch_gpu() -> None:
    """Raises Skipped where torch has no GPU."""
    if is_fake():
        raise Skipped("torch sees no GPU")
    import torch

    if not torch.cuda.is_available():
        raise Skipped("torch sees no GPU")


def time_ms(work: Callable[[int], None], rounds: int = 5) -> float:
    """The median time of `work`, which is given a stream, between two events around it; the first round is not
    counted."""
    driver, stream = opened(), opened().stream()
    begin, end = driver.event(timing=True), driver.event(timing=True)
    times = []
    for _ in range(rounds + 1):
        driver.cuEventRecord(begin, stream)
        work(stream)
        driver.cuEventRecord(end, stream)
        driver.cuEventSynchronize(end)
        times.append(driver.elapsed_ms(begin, end))
    driver.cuStreamDestroy_v2(stream)
    return statistics.median(times[1:])
