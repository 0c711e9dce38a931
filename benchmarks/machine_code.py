"""The loops of compiled kernels, read back from object files, and their cycles by llvm-mca: a static model of a CPU, on
which all loads hit the first cache. No measurement."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from errors import UserError
from files import ROOT

LLVM = "19"  # the major version: earlier ones have no model of neoverse-v2
DISASSEMBLER, MODEL = f"llvm-objdump-{LLVM}", f"llvm-mca-{LLVM}"
SOURCES = ROOT / "ops" / "cpu" / "csrc"
FLAGS = ["-std=c++17", "-O3", "-fPIC", f"-I{SOURCES}"]  # as ops/cpu/csrc/CMakeLists.txt
FORMATS = {"q4": 4, "q8": 3}  # the numbers of Format in kernels/matrix.h


@dataclass(frozen=True)
class Architecture:
    triple: str  # LLVM's name
    comment: str  # what a comment starts with
    branch: re.Pattern[str]  # instructions whose last operand is where they may go on
    leaves: frozenset[str]  # instructions that never go on to the next one
    products: Callable[[str], int]  # multiplications of an instruction
    turns: int  # of a loop that a model runs


@dataclass(frozen=True)
class Instruction:
    text: str  # as the assembler takes it
    following: tuple[int, ...]  # the places in the function's code that may come next


@dataclass(frozen=True)
class Kernel:
    """A function's loop over blocks of 32 columns."""

    function: str  # what its name contains
    weights: int  # of one turn of the loop: the weight rows that it takes at a time, times their columns
    rows: int  # activation rows


def command(*words: str, given: str = "") -> str:
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} is not installed; bash test.sh installs it where it may")
    return subprocess.run(words, input=given, capture_output=True, text=True, check=True).stdout


def compiled(compiler: str, source: Path, folder: str, *options: str) -> Path:
    made = Path(folder) / f"{source.stem}.o"
    command(compiler, *FLAGS, *options, "-c", str(source), "-o", str(made))
    return made


@cache
def functions(made: Path, machine: Architecture) -> dict[str, list[Instruction]]:
    """The code of an object file. It is read back since an assembler's text may hold instructions as numbers, which
    llvm-mca leaves out without a word."""
    found = {}
    for part in command(DISASSEMBLER, "-d", "-C", "--no-show-raw-insn", str(made)).split("\n\n"):
        if not (name := re.search(r"^[0-9a-f]+ <(.+)>:$", part, re.M)):
            continue
        lines = re.findall(r"^ *([0-9a-f]+):\s+(.*)$", part, re.M)
        place = {int(address, 16): i for i, (address, _) in enumerate(lines)}
        code = []
        for i, (_, line) in enumerate(lines):
            text = re.sub(rf"\s*(<.*|{machine.comment}.*)$", "", line).replace("\t", " ")
            word = text.split()[0]
            after = {i + 1} if i + 1 < len(lines) and word not in machine.leaves else set()
            target = re.search(r"\b0x([0-9a-f]+)$", text)
            if machine.branch.match(word) and target and int(target[1], 16) in place:
                after.add(place[int(target[1], 16)])
            code.append(Instruction(text, tuple(after)))
        found[name[1]] = code
    return found


def inner_loops(code: Sequence[Instruction]) -> Iterator[list[str]]:
    """For each loop without another one in it, the longest way round: without branches the whole of it."""
    order: list[int] = []  # each place after all that can come later, but for branches back
    backward: list[tuple[int, int]] = []
    open_places, seen, stack = {0}, {0}, [(0, iter(code[0].following))]
    while stack:
        place, following = stack[-1]
        if (to := next(following, None)) is None:
            order.append(place)
            open_places.remove(place)
            stack.pop()
        elif to in open_places:
            backward.append((place, to))
        elif to not in seen:
            seen.add(to)
            open_places.add(to)
            stack.append((to, iter(code[to].following)))
    before: dict[int, set[int]] = {place: set() for place in seen}
    for place in seen:
        for to in code[place].following:
            before[to].add(place)
    heads = {head for _, head in backward}
    for head in heads:
        body, grow = {head}, [tail for tail, to in backward if to == head]
        while grow:
            if (place := grow.pop()) not in body:
                body.add(place)
                grow += before[place]
        if heads & body != {head}:
            continue
        ways: dict[int, list[int]] = {}  # the longest from a place to the end of the turn
        for place in (place for place in order if place in body):
            ways[place] = [place, *max((ways[to] for to in code[place].following if to in ways), key=len, default=[])]
        yield [code[place].text for place in ways[head]]


def products(way: Sequence[str], machine: Architecture) -> int:
    return sum(machine.products(text) for text in way)


def turn(made: Path, kernel: Kernel, machine: Architecture) -> list[str]:
    """The instructions of one turn of the kernel's loop."""
    named = [code for name, code in functions(made, machine).items() if kernel.function in name]
    wanted = kernel.weights * kernel.rows
    loops = [way for code in named for way in inner_loops(code) if products(way, machine) == wanted]
    if len(loops) != 1:
        raise UserError(
            f"{kernel.function}: {len(loops)} loops of {len(named)} functions multiply {kernel.weights} weights by "
            f"{kernel.rows} rows; one must: see how {made.name} was compiled"
        )
    return loops[0]


def cycles(way: Sequence[str], cpu: str, machine: Architecture) -> tuple[float, float]:
    """Of one turn: cycles by the model, and those in which its busiest unit is busy."""
    turns = machine.turns
    target = [f"-mtriple={machine.triple}", f"-mcpu={cpu}", f"-iterations={turns}", "-json"]
    found = json.loads(command(MODEL, *target, given="\n".join(way)))["CodeRegions"][0]
    summary, pressure = found["SummaryView"], found["ResourcePressureView"]["ResourcePressureInfo"]
    if summary["Instructions"] != turns * len(way):
        raise UserError(f"{MODEL} took {summary['Instructions'] // turns} of {len(way)} instructions for {cpu}")
    # What comes after the last instruction is the sum of all.
    busiest = max(unit["ResourceUsage"] for unit in pressure if unit["InstructionIndex"] == len(way))
    return summary["TotalCycles"] / turns, busiest
