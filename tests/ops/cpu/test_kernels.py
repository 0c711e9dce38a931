"""The native kernels without Python: every instruction set of this machine, and those of ARM under emulation.

`native/kernels.cpp` compares each set with the generic kernels and the layers with plain loops; here it is built for
this machine and for aarch64, and run where the sets exist and where they do not.
"""

import platform
import re
import shutil
import subprocess

import pytest

from tests.ops.cpu.native.build import SOURCES, TESTS, compile_all, core_sources, made_once, program, run
from umbra.ops.cpu import engine

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
WARNINGS = ["-O3", "-Wall", "-Wextra"]
# GCC 12's own AVX-512 header trips the uninitialised warnings.
OF_MACHINE = {  # as CMakeLists.txt has them
    "x86_64": ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "--param=avoid-fma-max-bits=0"],
    "aarch64": [],
}

# Instructions per weight and activation row: (set, format) -> {activation rows: count}. Counts, not speed.
COUNTS: dict[tuple[str, str], dict[int, float]] = {("neon_dotprod", "q4"): {1: 0.227, 2: 0.177, 4: 0.155}}
COUNTS |= {("neon_dotprod", "q8"): {1: 0.219, 2: 0.160, 4: 0.149}}
COUNTS |= {("neon_dotprod", "bfloat16"): {1: 0.706, 2: 0.486, 4: 0.400}}
COUNTS |= {("neon_dotprod", "float16"): {1: 0.769, 2: 0.486, 4: 0.400}}
COUNTS |= {
    ("neon_dotprod", "float32"): {1: 0.550, 2: 0.408, 4: 0.361},
    ("neon_i8mm", "q4"): {1: 0.254, 2: 0.150, 4: 0.119},
}
COUNTS |= {("neon_i8mm", "q8"): {1: 0.244, 2: 0.142, 4: 0.115}}
COUNTED_WITH = "12"  # the major version of GCC


def build(compiler: str, machine: str, *link: str) -> str:
    flags = [*WARNINGS, *OF_MACHINE[machine]]
    sources = [*core_sources(machine), TESTS / "kernels.cpp"]
    return program("kernels", compiler, flags, sources, [*link, "-pthread"])


@pytest.fixture(scope="module")
def arm() -> str:
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed; bash test.sh installs it where it may")
    return build(COMPILER, "aarch64", "-static")


@pytest.fixture(scope="module")
def here() -> str:
    return build("g++", platform.machine())


def parity(*command: str) -> str:
    """Run every check; the set that was used."""
    lines = run(*command).stdout.splitlines()
    assert lines[-1] == "ok"
    return lines[0].removeprefix("kernels ")


PACKING = ("runtime/pool", "kernels/attention", "kernels/delta", "kernels/generic", "kernels/pack", "kernels/slots")


def packing(compiler: str, machine: str, *flags: str) -> str:
    """A program that prints a number for packed rows of every kind. `flags` are for what packs; the rest is the same
    as in the programs above."""
    shared = [*WARNINGS, *OF_MACHINE[machine]]
    objects = compile_all(compiler, shared, [SOURCES / f"{name}.cpp" for name in PACKING])
    objects += compile_all(
        compiler, [*shared, *flags], [SOURCES / "kernels" / f"{n}.cpp" for n in ("panel", "blocks", "records")]
    )
    objects += compile_all(compiler, ["-O3"], [TESTS / "packing.cpp"])
    static = ["-static"] if compiler == COMPILER else []
    return str(made_once("packing", [compiler, *shared, *objects, *static, "-pthread"]))


@pytest.fixture(scope="module")
def plain() -> str:
    return run(packing("g++", platform.machine(), "-DCLONES=")).stdout


@pytest.mark.parametrize("target", ["avx2", "avx512f"])
def test_every_set_packs_the_same_bytes(plain: str, target: str) -> None:
    if platform.machine() != "x86_64" or not any(target[:6] in name for name in engine.module.instruction_sets()):
        pytest.skip(f"this CPU has no {target}")
    assert len(plain.splitlines()) == 122
    assert run(packing("g++", "x86_64", f'-DCLONES=__attribute__((target("{target}")))')).stdout == plain


def test_arm_packs_the_same_bytes(arm: str, plain: str) -> None:
    assert arm
    assert run(EMULATOR, packing(COMPILER, "aarch64")).stdout == plain


def refusal(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


@pytest.mark.parametrize("instruction_set", engine.module.instruction_sets())
def test_parity_on_this_machine(here: str, instruction_set: str) -> None:
    assert parity(here, instruction_set) == instruction_set


@pytest.mark.parametrize(
    ("cpu", "instruction_set", "used"),
    [
        ("max", "auto", "neon_i8mm"),
        ("max", "neon_dotprod", "neon_dotprod"),
        ("max", "generic", "generic"),
        ("neoverse-n1", "auto", "neon_dotprod"),  # as Kunpeng 920: dotprod, but no i8mm
        # Plain ARMv8: anything more would be an illegal instruction.
        ("cortex-a72", "auto", "generic"),
    ],
)
def test_parity_on_arm(arm: str, cpu: str, instruction_set: str, used: str) -> None:
    assert parity(EMULATOR, "-cpu", cpu, arm, instruction_set) == used


@pytest.mark.parametrize(
    ("cpu", "instruction_set", "message"),
    [
        ("neoverse-n1", "neon_i8mm", "needs dotprod and i8mm (ARMv8.6), which this CPU lacks; usable: generic, neon_"),
        ("cortex-a72", "neon_dotprod", "needs dotprod (ARMv8.2), which this CPU lacks; usable: generic\n"),
        ("cortex-a72", "avx2", "needs AVX2, FMA and F16C (x86-64), which this CPU lacks; usable: generic\n"),
        ("cortex-a72", "sve", "is not a set of kernels; usable: generic\n"),
    ],
)
def test_what_an_arm_cpu_lacks_is_said(arm: str, cpu: str, instruction_set: str, message: str) -> None:
    said = refusal(EMULATOR, "-cpu", cpu, arm, instruction_set)
    assert said.startswith(f"instruction_set: {instruction_set} {message}")
    assert said.count("\n") == 1


@pytest.fixture(scope="module")
def counter() -> str:
    """A plugin for the emulator that prints the number of instructions run."""
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"{EMULATOR} is not installed; bash test.sh installs it where it may")
    release = re.search(r"version (\d+)", run(EMULATOR, "--version").stdout)
    assert release
    api = 1 if int(release[1]) < 9 else 2  # 9.0 dropped the first plugin API
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-DAPI={api}"]
    return str(made_once("icount.so", ["gcc", *flags, str(TESTS / "icount.c")]))


@pytest.mark.parametrize(("instruction_set", "format"), COUNTS)
def test_instructions_per_weight(arm: str, counter: str, instruction_set: str, format: str) -> None:
    version = run(COMPILER, "-dumpversion").stdout.split(".")[0].strip()
    if version != COUNTED_WITH:
        pytest.skip(f"counts were recorded with GCC {COUNTED_WITH}, this is GCC {version}")

    def executed(rows: int, rounds: int) -> tuple[int, int]:
        """Instructions of the whole program, and weights of a round."""
        command = [EMULATOR, "-cpu", "max", "-plugin", counter, arm, instruction_set, "--count", format]
        done = run(*command, str(rows), str(rounds))
        return int(done.stderr.split()[1]), int(done.stdout.split()[0])

    for rows, recorded in COUNTS[instruction_set, format].items():
        once, weights = executed(rows, 1)
        count = (executed(rows, 3)[0] - once) / (2 * weights * rows)  # what surrounds the rounds cancels out
        at = f"{instruction_set}, {format}, {rows} rows: {count:.4f} instructions per weight, recorded {recorded}"
        assert count <= 1.03 * recorded, f"{at}: worse"
        assert count >= 0.9 * recorded, f"{at}: record the new value"


WITH_TILES = {"dispatch", "amx", "probe"}


@pytest.fixture(scope="module")
def twin() -> str:
    """The program compiled against `native/twin`, with which it has AMX on a CPU that has only AVX512-BF16."""
    flags = [*WARNINGS, *OF_MACHINE["x86_64"]]
    sets = engine.module.instruction_sets()
    if "amx" in sets:
        pytest.skip("this CPU has tiles of its own, with which the test above runs the same program")
    if "avx512_bf16" not in sets:
        pytest.skip("this CPU has no AVX512-BF16, which the kernels with AMX use beside it")
    sources = [*core_sources("x86_64"), TESTS / "kernels.cpp"]
    tiled = [path for path in sources if path.stem in WITH_TILES]
    objects = compile_all("g++", flags, [path for path in sources if path not in tiled])
    objects += compile_all("g++", [f"-iquote{TESTS / 'twin'}", *flags], tiled)
    return str(made_once("kernels", ["g++", *flags, *objects, "-pthread"]))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these kernels are for x86-64")
def test_parity_on_a_twin_of_the_tiles(twin: str) -> None:
    assert parity(twin, "auto") == "amx"
