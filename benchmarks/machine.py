"""The limits of this machine, measured beside whatever is compared with them: plain reads and int8 multiply-adds."""

import statistics
import time
from collections.abc import Callable

from ops.cpu.engine import native


def median_seconds(run: Callable[[], object], seconds: float = 1.0, least: int = 5) -> float:
    """Median time of `run` over about `seconds`, after one call that is not counted."""
    run()
    times: list[float] = []
    while len(times) < least or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_gbps(megabytes: int = 512) -> float:
    """GB/s of all threads reading memory that no cache holds."""
    probe = native().ReadProbe(megabytes << 20)
    return (megabytes << 20) / median_seconds(probe.run) / 1e9


def int8_gmacs() -> float:
    """10^9 int8 multiply-adds a second of all threads with everything in registers."""
    operations = native().mac_probe(1)
    rounds = max(1, int(2e9 // operations))
    return operations * rounds / median_seconds(lambda: native().mac_probe(rounds)) / 1e9
