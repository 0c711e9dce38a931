"""Runs the native code's synchronisation in every order that C++'s memory model allows: order/machine.h says how.

    .venv/bin/python -m tests.ops.cpu.native.ordering [--weaken] [--large] [program ...]

--weaken also weakens each memory order of the sources, one at a time, and leaves each wake-up and lock out, and says
which of these mistakes the program's scenarios find."""

import argparse
import re
import subprocess
from pathlib import Path

from tests.ops.cpu.native.build import BRIDGE, SOURCES, TESTS, compile_all, made_once, run

ORDER = TESTS / "order"
SHADOW, POOL, COPIER = (SOURCES / name for name in ("shadow/shadow.cpp", "runtime/pool.cpp", "shadow/copier.cpp"))
PROGRAMS: dict[str, list[Path]] = {  # the sources that each explores, beside its own file
    "litmus": [],
    "pool": [POOL],
    "shadow": [SHADOW, POOL],
    "copier": [COPIER, POOL],
    "bridge": [],
}
LIBRARY = ("atomicity.h", "atomic_futex.h", "/future:")  # reference counts and promises
SITE = re.compile(r"^site (0x[0-9a-f]+) (\w+) (\w+)$", re.MULTILINE)
MUTANT = re.compile(r"^mutant (0x[0-9a-f]+) (.*): ((?:not )?caught.*)$", re.MULTILINE)


def built(name: str) -> Path:
    search = ["-iquote", str(ORDER)]  # looked through first: its runtime/futex.h is taken
    flags = [*search, "-O2", "-g", "-w", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]
    objects = compile_all("g++", flags, [ORDER / f"{name}.cpp", *PROGRAMS[name]])
    objects += compile_all("g++", [*search, "-O2", "-g", "-Wall", "-Wextra"], [ORDER / "machine.cpp"])
    return made_once(f"order_{name}", ["g++", "-no-pie", "-rdynamic", "-pthread", *objects])


def explore(name: str, *arguments: str) -> str:
    """Runs the program and returns its output. Raises if an execution fails."""
    done = subprocess.run([str(built(name)), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def line_of(program: Path, address: str) -> str | None:
    """FILE:LINE of an address in the explored sources; None for what the standard library does by itself there."""
    places = run("addr2line", "-i", "-e", str(program), address).stdout.split("\n")
    for frame in places:
        path = frame.split(" ")[0]
        if any(header in path for header in LIBRARY):
            return None
        if path.startswith((str(SOURCES), str(BRIDGE))):
            return path.rsplit("/", 1)[-1]
    return None


def weakened(name: str, *arguments: str) -> list[tuple[str, str, str]]:
    """(FILE:LINE, what was weakened, whether and how that was found out) for each order, lock and wake-up."""
    program = built(name)
    ours = {}
    for address, _, _ in SITE.findall(explore(name, "--sites", *arguments)):
        if line := line_of(program, address):
            ours[address] = line
    weaker = []
    for address, line in sorted(ours.items(), key=lambda one: one[1]):
        printed = explore(name, "--weaken", address, *arguments)
        weaker += [(line, what, how) for _, what, how in MUTANT.findall(printed)]
    return weaker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--weaken", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--most", default="3000000", help="executions of a scenario at most")
    args = parser.parse_args()
    arguments = ["--most", args.most, *["--large"] * args.large]
    for name in args.programs:
        print(f"{name}\n{explore(name, *arguments)}", end="", flush=True)
        if args.weaken and name != "litmus":
            for line, what, how in weakened(name, *arguments):
                print(f"    {line}: {what}: {how}", flush=True)


if __name__ == "__main__":
    main()
