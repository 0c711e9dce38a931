"""Tries mutants: each with the tests that may find it, until one fails."""

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Container, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from files import ROOT
from tools.mutants import covered
from tools.mutants.forks import FLAGS, Collected, Outcome, fresh, import_libraries, run, startup_file
from tools.mutants.native import NativeMutant
from tools.mutants.operators import Mutant

STAGES = [(16, 4.0), (60, 12.0)]  # at most so many tests, of about so many seconds
AT_IMPORT = [(1000, 40.0)]  # the same for what runs at import, where it is less clear which test may find it
NEAR = 4  # variants of a test beside the file that come before the second one of a test elsewhere
MISSED = ("survived", "no test runs it")


def try_all(work: Path, chosen: Sequence[Mutant]) -> None:
    """First the mutants in bodies of functions, then those of what runs when a module is imported."""
    known: covered.Map = pickle.loads((work / "map.pickle").read_bytes())  # noqa: S301 (our own file)
    first = os.fork()  # what it imports must not be imported in this process
    if first == 0:
        import pytest

        def bodies(collected: Collected) -> None:
            def trial(mutant: Mutant) -> dict[str, Any]:
                name = f"{mutant.path}:{mutant.number}"
                stages, limits = stages_of(mutant, known, collected.items)
                return _in_stages(work, [partial(collected.run_tests, stage, name) for stage in stages], limits)

            _each(work, [mutant for mutant in chosen if not mutant.at_import], trial)

        pytest.main(
            [*FLAGS, "-s", *dict.fromkeys(test.split("::")[0] for test in known.tests)], plugins=[Collected(bodies)]
        )
        os._exit(0)
    os.waitpid(first, 0)

    def trial(mutant: Mutant) -> dict[str, Any]:
        stages, limits = stages_of(mutant, known)
        return _in_stages(work, [_fresh(mutant, stage) for stage in stages], limits)

    import_libraries(json.loads((work / "libraries.json").read_text()))
    _each(work, [mutant for mutant in chosen if mutant.at_import], trial)


def _fresh(mutant: Mutant, tests: list[str]) -> Callable[[], Outcome]:
    return partial(fresh, tests, f"{mutant.path}:{mutant.number}", first=True)


def try_again(work: Path, known: Sequence[Mutant], test_files: Sequence[str]) -> None:
    """The mutants that were missed so far, with whole files of tests, such as new ones or those of another Python."""
    missed = [mutant for mutant in known if mutant.name in outcomes(work / "results.jsonl", MISSED)]
    import_libraries(json.loads((work / "libraries.json").read_text()))
    _each(work, missed, lambda mutant: _in_stages(work, [_fresh(mutant, [file]) for file in test_files]), again=True)


def _each(work: Path, chosen: Sequence[Mutant], trial: Callable[[Mutant], dict[str, Any]], again: bool = False) -> None:
    done = {} if again else outcomes(work / "results.jsonl")
    with startup_file(Path(sysconfig.get_paths()["purelib"])), open(work / "results.jsonl", "a") as file:
        for position, mutant in enumerate(chosen):
            if mutant.name in done:
                continue
            row = {"name": mutant.name, "operator": mutant.operator, "line": mutant.line} | trial(mutant)
            _write(file, row, f"{position + 1}/{len(chosen)}")


def outcomes(path: Path, kinds: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """The last outcome of each mutant by its name; `kinds`: only those."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last = {row["name"]: row for row in rows}
    return {name: row for name, row in last.items() if not kinds or row["outcome"] in kinds}


def _write(file: "IO[str]", row: dict[str, Any], position: str) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()
    print(f"{position} {row['seconds']:.1f} s {row['outcome']}: {row['name']}", flush=True)


def _in_stages(work: Path, stages: Sequence[Callable[[], Outcome]], limits: Sequence[float] = ()) -> dict[str, Any]:
    """Runs the stages in forks, up to the first failure."""
    if not stages:
        return {"outcome": "no test runs it", "by": "", "seconds": 0.0}
    seconds = 0.0
    for number, stage in enumerate(stages):
        outcome = run(stage, work / "mutant.log", limits[number] if limits else 600)
        seconds += outcome.seconds
        if outcome.status != 0:
            end = {None: "ended from outside", 1: "killed"}.get(outcome.status, f"status {outcome.status}")
            return {"outcome": end, "by": (outcome.failed or [""])[0], "seconds": seconds}
    return {"outcome": "survived", "by": "", "seconds": seconds}


def tests_of(mutant: Mutant, known: covered.Map) -> list[int]:
    """The tests that may find the mutant, the most promising first: a few variants of each test function before others,
    quick ones before slow ones, and those beside the file before those of other parts. What runs at import may be found
    by any test of a file that imports the module; these come before all others."""
    lines = known.lines.get(mutant.path, {})
    files = [test.split("::")[0] for test in known.tests]
    importing: set[str] = set()
    mask = 0 if mutant.at_import else lines.get(mutant.line, 0)
    if not mask and not mutant.at_import:
        for line in range(mutant.statement[0], mutant.statement[1] + 1):
            mask |= lines.get(line, 0)
    if mutant.at_import:
        for found in lines.values():
            mask |= found
        module = mutant.path.removesuffix(".py").replace("/", ".")
        importing = {file for file in files if module in _imports(file)}
        mask |= sum(1 << number for number, file in enumerate(files) if file in importing)
    beside = "/".join(["tests", *Path(mutant.path).parent.parts[:2]]).replace("tests/executor/serving", "tests/serving")
    by_function: dict[str, list[int]] = {}
    for number in known.selected(mask):
        by_function.setdefault(known.tests[number].split("[")[0], []).append(number)
    ranked = []
    for variants in by_function.values():
        for rank, number in enumerate(sorted(variants, key=lambda n: known.seconds[n])):
            near = known.tests[number].startswith(beside)
            seconds = known.seconds[number] * (1 if near else NEAR)
            ranked.append((files[number] not in importing, rank // (NEAR if near else 1), seconds, number))
    return [number for *_, number in sorted(ranked)]


@cache
def _imports(file: str) -> set[str]:
    """The modules that a file imports, and the names that it imports from them."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def stages_of(
    mutant: Mutant, known: covered.Map, there: Container[str] | None = None
) -> tuple[list[list[str]], list[float]]:
    """The tests to run stage by stage, as far as they are `there`, and the seconds that each stage may take."""
    tests = [n for n in tests_of(mutant, known) if there is None or known.tests[n] in there]
    stages: list[list[str]] = []
    limits = []
    count = 0
    for most, limit_s in AT_IMPORT if mutant.at_import else STAGES:
        stage: list[str] = []
        estimate = 0.0
        while count < len(tests) and len(stage) < most and (not stage or estimate < limit_s):
            stage.append(known.tests[tests[count]])
            estimate += known.seconds[tests[count]]
            count += 1
        if stage:
            stages.append(stage)
            limits.append(30 + 5 * estimate)
    return stages, limits


def try_native(work: Path, chosen: Sequence[NativeMutant], stages: Sequence[Sequence[str]]) -> None:
    """Writes each mutant into its file, builds the module and runs the stages of tests; then the file is as before."""
    import_libraries(json.loads((work / "libraries.json").read_text()))
    configure()
    done = outcomes(work / "native.jsonl")
    trials = [partial(fresh, [*stage], first=True) for stage in stages]
    if (plain := _in_stages(work, trials))["outcome"] not in MISSED:
        raise RuntimeError(f"without a mutant: {plain['outcome']} by {plain['by']}: leave it out")
    with open(work / "native.jsonl", "a") as file:
        for position, mutant in enumerate(chosen):
            if mutant.name in done:
                continue
            path = ROOT / mutant.path
            text = path.read_text()
            path.write_text(text[: mutant.start] + mutant.new + text[mutant.end :])
            try:
                outcome = _in_stages(work, trials) if build() else {"outcome": "does not compile", "seconds": 0.0}
            finally:
                path.write_text(text)
            _write(file, {"name": mutant.name, "line": mutant.line} | outcome, f"{position + 1}/{len(chosen)}")
    build()


BUILD = ROOT / "build" / "mutants"


def configure() -> None:
    import pybind11

    command = ["-S", str(ROOT / "ops" / "cpu" / "csrc"), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    command += ["-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    subprocess.run([tool("cmake"), *command], check=True, capture_output=True)
    if not build():
        raise RuntimeError("the native module does not build without a mutant")


def tool(name: str) -> str:
    return str(Path(sysconfig.get_paths()["scripts"]) / name)


def build() -> bool:
    """Whether it compiles; then it is in its place."""
    if subprocess.run([tool("cmake"), "--build", str(BUILD)], capture_output=True).returncode:
        return False
    [made] = BUILD.glob("_native*.so")
    fresh = ROOT / "ops" / "cpu" / (made.name + ".new")
    shutil.copy(made, fresh)
    os.replace(fresh, fresh.with_suffix(""))
    return True
