"""Mutation tests:  python -m tools.mutants map|run|again|native|report WORK  (docs/reliability.md)

`map` runs all tests once and notes which lines each runs. `run` tries a random sample of mutants, each with the tests
that run its line. `report` gives the share of them that a test found, and names the others. Everything is kept in the
folder WORK, where an interrupted run goes on. Mutants may do anything with files and processes: docs/reliability.md
shows how they are kept in namespaces of their own.
"""

import argparse
import json
import pickle
import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from files import ROOT
from tools.mutants import covered
from tools.mutants.forks import Outcome, import_libraries
from tools.mutants.native import NativeMutant, native_mutants
from tools.mutants.operators import Mutant, mutants
from tools.mutants.trials import MISSED, outcomes, try_again, try_all, try_native

AREAS = {"executor": "executor/**/*.py", "cpu_offload": "cpu_offload/**/*.py", "ops": "ops/*.py"}
SOURCES = ["executor", "cpu_offload", "ops", "models"]
FILE_LIMIT_S = 900.0
ELSEWHERE = {"amx", "tiles", "tile_shapes", "i8mm", "neon", "stream"}  # tests emulate the processors of these
M = TypeVar("M", Mutant, NativeMutant)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("command", choices=["map", "run", "again", "native", "report"])
    parser.add_argument("work", type=Path)
    parser.add_argument(
        "--tests", nargs="*", default=["tests"], help="map, again: folders and files of tests, in this order"
    )
    parser.add_argument("--leave-out", nargs="*", default=[], help="map: test files")
    parser.add_argument("--marked", default="", help="map: only tests of these marks, as pytest's -m")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000, help="run: mutants of all areas")
    parser.add_argument("--each", type=int, default=3, help="run: at least so many of a file")
    parser.add_argument("--stages", nargs="*", default=[], help="native: tests, separated by commas; one stage each")
    parser.add_argument("--only", default="", help="run: all mutants whose name begins so; again: only those")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.command == "map":
        make_map(given.work, given.tests, given.leave_out, given.marked)
    elif given.command == "run":
        sample = [m for m in everything() if m.name.startswith(given.only)] if given.only else []
        try_all(given.work, sample or sampled(given.seed, given.count, given.each))
    elif given.command == "again":
        try_again(given.work, [m for m in everything() if m.name.startswith(given.only)], given.tests)
    elif given.command == "native":
        try_native(
            given.work, sampled_native(given.seed, given.count, given.each), [s.split(",") for s in given.stages]
        )
    else:
        report(given.work)


def make_map(work: Path, tests: list[str], left_out: list[str], marked: str) -> None:
    names = work / "libraries.json"
    if not names.exists():
        names.write_text(json.dumps(covered.libraries()))
    import_libraries(json.loads(names.read_text()))
    paths = [ROOT / test for test in tests]
    files = [f for p in paths for f in ([p] if p.is_file() else sorted(p.rglob("test_*.py")))]
    for name in dict.fromkeys(f.relative_to(ROOT).as_posix() for f in files):
        kept = work / (name.replace("/", ".") + ".outcome")
        if name in left_out or kept.exists():
            continue
        outcome = covered.measure(name, ["-m", marked], work, [str(ROOT / s) for s in SOURCES], FILE_LIMIT_S)
        kept.write_text(json.dumps({"file": name, "outcome": asdict(outcome)}))
        counts = f"{len(outcome.passed)} tests, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped"
        print(f"{outcome.seconds:7.1f} s  {name}: {counts}, status {outcome.status}", flush=True)
    outcomes = [json.loads(path.read_text()) for path in sorted(work.glob("*.outcome"))]
    merged = covered.merge({o["file"]: Outcome(**o["outcome"]) for o in outcomes}, work)
    (work / "map.pickle").write_bytes(pickle.dumps(merged))
    print(f"{len(merged.tests)} tests, {sum(merged.seconds):.0f} s, {sum(map(len, merged.lines.values()))} lines")


def everything() -> list[Mutant]:
    return [m for pattern in AREAS.values() for path in sorted(ROOT.glob(pattern)) for m in mutants(path)]


def sampled(seed: int, count: int, each: int) -> list[Mutant]:
    """A random sample, the same share of every file but at least `each` of it, in random order."""
    by_file: dict[str, list[Mutant]] = {}
    for mutant in everything():
        by_file.setdefault(mutant.path, []).append(mutant)
    return _draw(by_file, seed, count, each)


def _draw(by_file: Mapping[Any, list[M]], seed: int, count: int, each: int) -> list[M]:
    share = count / sum(map(len, by_file.values()))
    draw = random.Random(seed)
    counts = {file: min(len(found), max(each, round(len(found) * share))) for file, found in by_file.items()}
    chosen = [m for file, found in by_file.items() for m in draw.sample(found, counts[file])]
    draw.shuffle(chosen)
    return chosen


def sampled_native(seed: int, count: int, each: int) -> list[NativeMutant]:
    """As `sampled`, of the sources that this machine's processor runs."""
    folders = ["kernels", "kernels/x86", "runtime", "shadow"]
    files = sorted(p for f in folders for end in ("cpp", "h") for p in (ROOT / "ops/cpu/csrc" / f).glob(f"*.{end}"))
    return _draw({p: native_mutants(p) for p in files if p.stem not in ELSEWHERE}, seed, count, each)


def report(work: Path) -> None:
    for name, areas in (("results", [*AREAS, ""]), ("native", [""])):
        rows = [r for r in outcomes(work / f"{name}.jsonl").values() if r["outcome"] != "does not compile"]
        for area in areas:
            of_area = [r for r in rows if r["name"].startswith(area)]
            killed = sum(r["outcome"] not in MISSED for r in of_area)
            low, high = wilson(killed, len(of_area))
            share = 100 * killed / max(1, len(of_area))
            print(f"{name} {area:12} {killed} of {len(of_area)} killed, {share:.1f} % ({low:.1f} to {high:.1f})")
        for row in rows:
            if row["outcome"] in MISSED:
                print(f"{row['outcome']}: {row['name']}   # line {row['line']}, {row['by']}")


def wilson(killed: int, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share, in percent."""
    z, share = 1.96, killed / count if count else 0.0
    scale = 1 + z * z / max(1, count)
    middle = share + z * z / (2 * max(1, count))
    spread = z * (share * (1 - share) / max(1, count) + z * z / (4 * max(1, count) ** 2)) ** 0.5
    return 100 * (middle - spread) / scale, 100 * (middle + spread) / scale


if __name__ == "__main__":
    main()
