"""Fuzzes the native code with libFuzzer under AddressSanitizer and UBSan: fuzz/*.cpp are the targets, fuzz/*.corpus the
inputs that they begin with, one in base64 a line.

    .venv/bin/python -m tests.ops.cpu.native.fuzzing [--runs N] [target ...]
"""

import argparse
import base64
import functools
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.fuzz.target import IN_MEMORY
from tests.ops.cpu.native.build import (
    OP_HOST,
    PRODUCTS,
    SHADOW,
    SOURCES,
    TESTS,
    TWIN_HOST,
    compile_all,
    core_sources,
    made_once,
)

FUZZ = TESTS / "fuzz"
TARGETS = sorted(path.stem for path in FUZZ.glob("*.cpp"))
STATS = re.compile(r"^#(\d+)\s.* cov: (\d+) ft: (\d+)", re.MULTILINE)


@functools.cache
def compiler() -> str | None:
    """A Clang with libFuzzer, or None."""
    versions = (f"clang++-{version}" for version in range(30, 13, -1))
    for name in filter(shutil.which, ("clang++", *versions)):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text(
                "#include <fuzzer/FuzzedDataProvider.h>\n"
                'extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }\n'
            )
            command = [name, "-fsanitize=fuzzer,address,undefined", str(source), "-o", f"{folder}/probe"]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return name
    return None


def beside(target: str) -> list[Path]:
    """The sources of the engine that `target` needs. Only `dispatch` chooses among the kernels of this machine, which
    take longest to compile."""
    if target == "dispatch":
        return core_sources(platform.machine())
    parts = [*PRODUCTS, "kernels/sampling", *SHADOW] if target != "tiling" else ["runtime/pool"]
    return [SOURCES / f"{part}.cpp" for part in parts]


def built(target: str) -> Path:
    """The program that fuzzes `target`."""
    clang = compiler()
    assert clang is not None
    sanitizers = "address,undefined"
    # Kernels read packed rows through wider types on purpose; x86 and ARM allow any alignment there.
    flags = ["-O1", "-g", "-w", "-pthread", f"-fsanitize=fuzzer-no-link,{sanitizers}", "-fno-sanitize=alignment"]
    flags += ["-fno-sanitize-recover=undefined", "-include", str(FUZZ / "clang.h")]
    flags.append("-DCLONES=")  # Clang cannot clone functions whose templates the sets would share
    own = [f"-I{TWIN_HOST}", f"-I{OP_HOST}", f"-I{FUZZ}"]
    host = sorted(OP_HOST.glob("*.cpp")) if target == "tiling" else []
    objects = compile_all(clang, [*flags, *own], [FUZZ / f"{target}.cpp", *host])
    objects += compile_all(clang, flags, beside(target))
    link = [f"-fsanitize=fuzzer,{sanitizers}", "-rdynamic", "-pthread", "-ldl"]
    return made_once(f"fuzz_{target}", [clang, *link, *objects])


def fuzz(target: str, runs: int, folder: Path) -> str:
    """Runs `target` on its corpus and on `runs` inputs altogether; `folder` receives those that covered more. Returns
    what was run and covered, and raises where an input failed."""
    for number, line in enumerate((FUZZ / f"{target}.corpus").read_text().split()):
        (folder / f"{number:03}").write_bytes(base64.b64decode(line))
    # libFuzzer would take the peak memory of the process that started it for its own (getrusage), so one allocation is
    # bounded and not all of them together.
    limits = ["-timeout=10", "-rss_limit_mb=0", "-malloc_limit_mb=1500", "-max_len=1024"]
    limits += ["-close_fd_mask=2"] * (target == "tiling")  # refusals would take most of the time
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as artifacts:
        where = f"-artifact_prefix={artifacts}/"
        command = [str(built(target)), *limits, where, f"-runs={runs}", "-seed=1", str(folder)]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=os.environ | {"TMPDIR": artifacts}
        )
        failing = [base64.b64encode(path.read_bytes()).decode() for path in Path(artifacts).iterdir() if path.is_file()]
    assert done.returncode == 0, f"{target} fails on {failing} (base64)\n{done.stderr[-6000:]}"
    executed, covered, features = STATS.findall(done.stderr)[-1]
    return f"{target}: {executed} executions, {covered} edges and {features} features covered"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=TARGETS)
    parser.add_argument("--runs", type=int, default=1_000_000)
    args = parser.parse_args()
    for target in args.targets:
        with tempfile.TemporaryDirectory() as folder:
            print(fuzz(target, args.runs, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
