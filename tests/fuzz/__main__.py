"""Fuzzes one target or all:

    python -m tests.fuzz [TARGET ...] [--runs N] [--seconds S] [--keep FOLDER]

With atheris (bash test.sh fuzz sets it up) inputs are chosen by what they cover, otherwise the corpus is changed at
random. An input that does what none may is written to FOLDER/TARGET.crash, and the exit status is 1.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz.mutation import mutated
from tests.fuzz.target import IN_MEMORY
from tests.fuzz.targets import PLACES, corpus, maker

INSTRUMENTED = [
    "umbra.base.errors",
    "umbra.base.files",
    "umbra.models",
    "umbra.executor",
    "umbra.serving",
    "umbra.text",
    "umbra.ops.formats",
    "umbra.ops.words",
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", choices=[[], *PLACES], metavar="TARGET", help=", ".join(PLACES))
    parser.add_argument("--runs", type=int, default=0, help="inputs for each target; 0: as many as the time allows")
    parser.add_argument("--seconds", type=float, default=0, help="for all targets together; 0: no limit")
    parser.add_argument("--keep", type=Path, help="folder of inputs that cover more, kept between calls")
    args = parser.parse_args()
    names = args.targets or list(PLACES)
    if not args.runs and not args.seconds:
        parser.error("give --runs or --seconds")
    if len(names) > 1:  # each in a process of its own: its code is instrumented when it is imported
        limits = [f"--runs={args.runs}", f"--seconds={args.seconds / len(names)}"]
        limits += [f"--keep={args.keep}"] if args.keep else []
        failed = [n for n in names if subprocess.run([sys.executable, "-m", "tests.fuzz", n, *limits]).returncode]
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")
    elif find_spec("atheris"):
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            if not (child := os.fork()):  # libFuzzer ends its process
                guided(names[0], args.runs, args.seconds, args.keep, Path(folder))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.exit(1 if status else 0)
    else:
        print("atheris is not installed: the corpus is changed at random", file=sys.stderr)
        plain(names[0], args.runs, args.seconds)


def plain(name: str, runs: int, seconds: float) -> None:
    from tests.fuzz.target import Bounds

    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        tempfile.tempdir = folder
        bounds = Bounds(maker(name), Path(folder))
        target, rng, done = bounds.target, random.Random(0), 0
        seeds, end = target.seeds + corpus(name), time.monotonic() + seconds
        while (not runs or done < runs) and (not seconds or time.monotonic() < end):
            data = mutated(rng.choice(seeds), seeds, target.json, target.longest, rng)
            done += 1
            try:
                bounds(data)
            except BaseException:
                _crash(name, data)
                raise
        print(f"{name}: {done} inputs")


def guided(name: str, runs: int, seconds: float, keep: Path | None, folder: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.target import Bounds

        make = maker(name)
        places = [folder / "kept", folder / "seeds", folder / "files"]
        for directory in places:
            directory.mkdir()
        tempfile.tempdir = str(places[2])
        bounds = Bounds(make, places[2])
    target, seeds = bounds.target, bounds.target.seeds + corpus(name)
    for number, seed in enumerate(seeds):
        (places[1] / str(number)).write_bytes(seed)

    def one(data: bytes) -> None:
        try:
            bounds(data)
        except BaseException:
            _crash(name, data)
            traceback.print_exc()
            raise

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return bytes(atheris.Mutate(data, longest))
        return mutated(data, seeds, target.json, longest, rng)

    if keep:
        places[0] = keep / name
        places[0].mkdir(parents=True, exist_ok=True)
    flags = [
        f"-max_len={target.longest}",
        "-timeout=300",
        "-rss_limit_mb=3000",
        "-verbosity=1",
        f"-artifact_prefix={folder}/",
    ]
    flags += [f"-runs={runs}"] if runs else []
    flags += [f"-max_total_time={max(1, round(seconds))}"] if seconds else []
    atheris.Setup([sys.argv[0], *flags, *map(str, places[:2])], one, custom_mutator=mutate)
    atheris.Fuzz()


def _crash(name: str, data: bytes) -> None:
    path = Path(f"/tmp/umbra-fuzz-{name}.crash")
    path.write_bytes(data)
    print(f"{name}: the input is in {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
