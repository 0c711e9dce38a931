"""The x86 kernels without Python: AMX on a twin of its tiles, and the loops of the quantised products in static models.

`native/kernels.cpp` compares each set with the generic kernels, the layers with plain loops, and the bits of all x86
sets with each other; `test_arm.py` runs it for the sets of this machine. Here what uses tiles is compiled against
`native/twin`, so that the program has AMX on a CPU that has only AVX512-BF16.
"""

import platform
import shutil
from pathlib import Path

import pytest

from benchmarks import machine_code
from benchmarks.x86_cycles import FILES, cycles_per_weight, without_tiles
from ops.cpu import engine
from tests.ops.cpu.native.build import TESTS, compile_all, core_sources, made_once, run
from tests.ops.cpu.test_arm import COUNTED_WITH, OF_MACHINE, WARNINGS, parity

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="these kernels are for x86-64"),
]

FLAGS = [*WARNINGS, *OF_MACHINE["x86_64"]]
WITH_TILES = {"dispatch", "amx", "probe"}

# Cycles a weight, by the models of LLVM 19, which are no measurements: (CPU, set, format) -> {activation rows: cycles}.
CYCLES: dict[tuple[str, str, str], dict[int, float]] = {
    ("alderlake", "avx2", "q4"): {1: 0.0449, 4: 0.1237},
    ("alderlake", "avx2", "q8"): {1: 0.0709, 4: 0.2335},
    ("alderlake", "avx_vnni", "q4"): {1: 0.0401, 4: 0.0967},
    ("alderlake", "avx_vnni", "q8"): {1: 0.0362, 4: 0.0968},
    ("sapphirerapids", "avx512_vnni", "q4"): {1: 0.0315, 4: 0.0959},
    ("sapphirerapids", "avx512_vnni", "q8"): {1: 0.0257, 4: 0.092},
    ("sapphirerapids", "amx", "q4"): {16: 0.1473, 64: 0.5071},
    ("sapphirerapids", "amx", "q8"): {16: 0.1378, 64: 0.4977},
    ("skylake-avx512", "avx512_vnni", "q4"): {1: 0.0274, 4: 0.0632},
    ("skylake-avx512", "avx512_vnni", "q8"): {1: 0.0277, 4: 0.0573},
    ("skylake-avx512", "amx", "q4"): {16: 0.0989, 64: 0.3207},
    ("skylake-avx512", "amx", "q8"): {16: 0.0956, 64: 0.3173},
}


@pytest.fixture(scope="module")
def twin() -> str:
    """The program with the twin of the tiles."""
    if "avx512_bf16" not in engine.module.instruction_sets():
        pytest.skip("this CPU has no AVX512-BF16, which the kernels with AMX use beside it")
    sources = [*core_sources("x86_64"), TESTS / "kernels.cpp"]
    tiled = [path for path in sources if path.stem in WITH_TILES]
    objects = compile_all("g++", FLAGS, [path for path in sources if path not in tiled])
    objects += compile_all("g++", [f"-iquote{TESTS / 'twin'}", *FLAGS], tiled)
    return str(made_once("kernels", ["g++", *FLAGS, *objects, "-pthread"]))


def test_parity_on_a_twin_of_the_tiles(twin: str) -> None:
    assert parity(twin, "auto") == "amx"


@pytest.fixture(scope="module")
def objects() -> dict[str, Path]:
    """The object files of the kernels, which the test program holds."""
    for tool in (machine_code.MODEL, machine_code.DISASSEMBLER):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed; bash test.sh installs it where it may")
    version = run("g++", "-dumpversion").stdout.split(".")[0].strip()
    if version != COUNTED_WITH:
        pytest.skip(f"cycles were recorded with GCC {COUNTED_WITH}, this is GCC {version}")
    folder = machine_code.SOURCES / "kernels" / "x86"
    made = compile_all("g++", FLAGS, [folder / file for file in FILES.values()])
    return dict(zip(FILES, map(Path, made), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize(("cpu", "instruction_set", "format"), CYCLES)
def test_cycles_per_weight(objects: dict[str, Path], cpu: str, instruction_set: str, format: str) -> None:
    for rows, recorded in CYCLES[cpu, instruction_set, format].items():
        found = cycles_per_weight(objects[instruction_set], instruction_set, format, rows, cpu)[0]
        at = f"{cpu}, {instruction_set}, {format}, {rows} rows: {found:.4f} cycles a weight, recorded {recorded}"
        assert found <= 1.03 * recorded, f"{at}: worse"
        assert found >= 0.97 * recorded, f"{at}: record the new value"


def test_tiles_are_counted_as_rows() -> None:
    """A tile of activations is loaded once for four row blocks, one of weights has eight rows."""
    way = ["tileloadd (%rax,%rcx), %tmm2", "tileloadd (%rax,%rcx), %tmm6", "tilezero %tmm4"]
    way += ["tdpbssd %tmm6, %tmm2, %tmm4", "tilestored %tmm4, (%rdx,%rcx)", "vcvtdq2ps 64(%rdx), %zmm1"]
    loads, stores = ["prefetcht0 (%rax,%rcx)"] * (4 + 8), ["movq %rsp, (%rdx,%rcx)"] * 16
    assert without_tiles(way) == loads + stores + ["vcvtdq2ps 64(%rdx), %zmm1"]
