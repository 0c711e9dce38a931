"""Times the first decode step without and with the compile cache, and the second step. Without GE and kernels, these
are the times of dynamo, torchair and Umbra's own checks.

source tools/setup.sh; umbra_ascend_python -m umbra.tools.benchmarks.compile_cache 48        the number of layers
"""

import contextlib
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.ascend.engine import ascend_case, ascend_runner, prefilled
from tests.ascend.ge import ge_programs
from tests.ascend.ranks import run_ranks


def steps(rank: int, folder: Path, mode: str) -> tuple[float, float]:
    runner = ascend_runner(ascend_case(folder, f"exe_mode={mode}", "enable_cache_compile=true"), folder)
    prefilled(runner)
    times = []
    with ge_programs(), contextlib.redirect_stdout(None):
        for _ in range(2):
            start = time.perf_counter()
            runner.loop.step()
            torch.npu.synchronize()  # type: ignore[attr-defined]
            times.append(time.perf_counter() - start)
    return times[0], times[1]


def main() -> None:
    with tempfile.TemporaryDirectory() as top:
        for mode in ("ge_graph", "acl_graph", "npugraph_ex"):
            folder = Path(top, mode)
            folder.mkdir()
            ascend_case(folder, num_hidden_layers=int(sys.argv[1]))
            for cache in ("miss", "hit"):
                ((first, second),) = run_ranks(steps, 1, folder, mode)
                print(f"{mode:<12} {cache:<5} first step {first:6.2f} s, second {1e3 * second:5.1f} ms", flush=True)


if __name__ == "__main__":
    main()
