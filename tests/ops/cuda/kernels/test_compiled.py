"""Every kernel compiles for a GPU of compute capability 9.0, and takes no more of them than resources.json has."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.ops.cpu.native.build import run
from umbra.base.files import ROOT

TABLE = json.loads(Path(__file__).with_name("resources.json").read_text())
EACH_KERNEL = [
    "experts q4",
    "experts f8",
    "experts bfloat16",
    "attention",
    "latents",
    "states",
    "states by row",
    "rows",
]
EACH_KERNEL += ["publish"]
THOROUGH = [
    pytest.param(int(capability), list(calls), marks=pytest.mark.thorough) for capability, calls in TABLE.items()
]


@pytest.mark.parametrize(("capability", "calls"), [(90, EACH_KERNEL), *THOROUGH])
def test_kernels_take_what_the_table_has(capability: int, calls: list[str], tmp_path: Path) -> None:
    """In a process of its own, because kernels of this one run in the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    module = "tests.ops.cuda.kernels.compiled"
    printed = run(sys.executable, "-m", module, str(capability), *calls, cwd=ROOT, env=environment).stdout
    taken, allowed = json.loads(printed)[str(capability)], TABLE[str(capability)]
    assert list(taken) == calls
    more = {
        (call, kernel, of): (number, allowed[call][kernel][of])
        for call, kernels in taken.items()
        for kernel, numbers in kernels.items()
        for of, number in numbers.items()
        if number > allowed[call][kernel][of]
    }
    assert not more, "more than allowed"
