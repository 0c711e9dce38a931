"""The x86 kernels without Python: AMX on a twin of its tiles.

`native/kernels.cpp` compares each set with the generic kernels, the layers with plain loops, and the bits of all x86
sets with each other; `test_arm.py` runs it for the sets of this machine. Here what uses tiles is compiled against
`native/twin`, so that the program has AMX on a CPU that has only AVX512-BF16.
"""

import platform

import pytest

from ops.cpu import engine
from tests.ops.cpu.native.build import TESTS, compile_all, core_sources, made_once
from tests.ops.cpu.test_arm import OF_MACHINE, WARNINGS, parity

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="these kernels are for x86-64"),
]

FLAGS = [*WARNINGS, *OF_MACHINE["x86_64"]]
WITH_TILES = {"dispatch", "amx", "probe"}


@pytest.fixture(scope="module")
def twin() -> str:
    """The program with the twin of the tiles."""
    sets = engine.module.instruction_sets()
    if "amx" in sets:
        pytest.skip("this CPU has tiles of its own, with which test_arm.py runs the same program")
    if "avx512_bf16" not in sets:
        pytest.skip("this CPU has no AVX512-BF16, which the kernels with AMX use beside it")
    sources = [*core_sources("x86_64"), TESTS / "kernels.cpp"]
    tiled = [path for path in sources if path.stem in WITH_TILES]
    objects = compile_all("g++", FLAGS, [path for path in sources if path not in tiled])
    objects += compile_all("g++", [f"-iquote{TESTS / 'twin'}", *FLAGS], tiled)
    return str(made_once("kernels", ["g++", *FLAGS, *objects, "-pthread"]))


def test_parity_on_a_twin_of_the_tiles(twin: str) -> None:
    assert parity(twin, "auto") == "amx"
