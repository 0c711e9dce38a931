"""The CPU's own tests, on a processor whose instruction sets the machine of development does not have."""

import subprocess
import sys

from umbra.base.files import ROOT
from umbra.tools.npu_check.outcome import Check, Passed

LEFT_OUT = ("test_sanitizers.py", "test_numa.py", "test_kernels.py")  # they need other compilers, or emulate machines


def checks() -> list[Check]:
    return [Check("tests/ops/cpu", run)]


def run() -> Passed:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "14",
        "-p",
        "no:cacheprovider",
        "--maxfail",
        "20",
        "tests/ops/cpu",
    ]
    command += [f"--ignore=tests/ops/cpu/{name}" for name in LEFT_OUT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    last = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1].strip("= ")
    if done.returncode:
        raise RuntimeError(f"{last}: {'; '.join(lines[:8])}")
    return Passed(last)
