"""Cycles of the quantised ARM kernels by llvm-mca, a static model of four CPUs, beside llama.cpp's: no measurement.

    .venv/bin/python -m benchmarks.arm_cycles [--llama-cpp DIR] [--json FILE]

Both are compiled by the cross compiler as their builds do it, and the machine code is read back: of a kernel, the
innermost loop whose multiplications are those of one block of 32 columns, and the longest way round it, on which the
scales of a group are read in every turn. llvm-mca runs it on its model of a CPU, all loads hitting the first cache.

A row, of the table and of `rows` in the JSON file:
  cpu      by LLVM's name; tsv110 is Kunpeng 920
  set      the instruction set that both use, by our name
  format   q4 or q8; llama.cpp's Q4_0 and Q8_0
  rows     activation rows; 8 are two passes of 4 in both
  ours     cycles a weight: of a pass for all rows over its weights, averaged over many turns of the loop
  busy     cycles a weight in which the model's busiest unit is busy: no order of the instructions takes fewer
  theirs, their busy, ratio  llama.cpp's, with --llama-cpp DIR, a folder with its sources; ratio is theirs / ours
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.output import Row, flags, printed, write_rows
from errors import UserError, run_main
from files import ROOT

COMPILER, LLVM = "aarch64-linux-gnu-g++", "19"  # LLVM's major version: earlier ones have no model of neoverse-v2
DISASSEMBLER, MODEL = f"llvm-objdump-{LLVM}", f"llvm-mca-{LLVM}"
TURNS = 1000
MOST = 4  # rows of a pass, in both
SOURCES = ROOT / "ops" / "cpu" / "csrc"
FLAGS = ["-std=c++17", "-O3", "-fPIC", f"-I{SOURCES}"]  # as ops/cpu/csrc/CMakeLists.txt
GGML = Path("ggml") / "src" / "ggml-cpu"
FEATURES = {"neon_dotprod": "dotprod", "neon_i8mm": "dotprod+i8mm"}
FILES = {"neon_dotprod": "neon.cpp", "neon_i8mm": "i8mm.cpp"}
SETS = {
    "tsv110": ["neon_dotprod"],
    "neoverse-n1": ["neon_dotprod"],
    "neoverse-n2": ["neon_dotprod", "neon_i8mm"],
    "neoverse-v2": ["neon_dotprod", "neon_i8mm"],
}
FORMATS = {"q4": 4, "q8": 3}  # the numbers of Format in kernels/matrix.h
BRANCH = re.compile(r"b(\.\w+)?$|cbn?z$|tbn?z$")
PRODUCTS = {"sdot": 16, "smmla": 32}  # multiplications of an instruction
COLUMNS = (
    ("cpu", "cpu", 13, ""),
    ("set", "set", 14, ""),
    ("format", "format", 8, ""),
    ("rows", "rows", 6, ""),
    ("ours", "ours", 9, ".4f"),
    ("busy", "busy", 9, ".4f"),
)
THEIR_COLUMNS = (
    ("theirs", "theirs", 9, ".4f"),
    ("their busy", "busy", 9, ".4f"),
    ("ratio", "ratio", 8, ".2f"),
)


@dataclass(frozen=True)
class Instruction:
    text: str  # as the assembler takes it
    following: tuple[int, ...]  # the places in the function's code that may come next


@dataclass(frozen=True)
class Kernel:
    """A function's loop over blocks of 32 columns."""

    function: str  # what its name contains
    weights: int  # of one turn of the loop: the weight rows that it takes at a time, times 32
    rows: int  # activation rows


def our_kernel(instruction_set: str, format: str, rows: int) -> Kernel:
    matrix = f"(umbra::Format){FORMATS[format]}, false"
    if instruction_set == "neon_dotprod":
        name = f"dot_pass<{matrix}, {rows}>"
    else:
        name = f"row_pass<{matrix}>" if rows == 1 else f"pair_pass<{matrix}, {rows // 2}>"
    return Kernel(name, 16 * 32, rows)


def their_kernel(instruction_set: str, format: str, rows: int) -> Kernel:
    columns = 4 if instruction_set == "neon_dotprod" else 8
    kind = "gemv" if rows == 1 else "gemm"
    return Kernel(f"ggml_{kind}_{format}_0_4x{columns}_q8_0", 4 * 32, rows)


def command(*words: str, given: str = "") -> str:
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} is not installed; bash test.sh installs it where it may")
    return subprocess.run(words, input=given, capture_output=True, text=True, check=True).stdout


@cache
def functions(compiled: Path) -> dict[str, list[Instruction]]:
    """The code of an object file. It is read back since an assembler's text may hold instructions as numbers, which
    llvm-mca leaves out without a word."""
    found = {}
    for part in command(DISASSEMBLER, "-d", "-C", "--no-show-raw-insn", str(compiled)).split("\n\n"):
        if not (name := re.search(r"^[0-9a-f]+ <(.+)>:$", part, re.M)):
            continue
        lines = re.findall(r"^ *([0-9a-f]+):\s+(.*)$", part, re.M)
        place = {int(address, 16): i for i, (address, _) in enumerate(lines)}
        code = []
        for i, (_, line) in enumerate(lines):
            text = re.sub(r"\s*(<.*|//.*)$", "", line).replace("\t", " ")
            word = text.split()[0]
            after = {i + 1} if i + 1 < len(lines) and word not in ("b", "br", "ret") else set()
            if BRANCH.match(word) and int(text.split()[-1], 16) in place:
                after.add(place[int(text.split()[-1], 16)])
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


def turn(compiled: Path, kernel: Kernel) -> list[str]:
    """The instructions of one turn of the kernel's loop."""
    named = [code for name, code in functions(compiled).items() if kernel.function in name]
    loops = [way for code in named for way in inner_loops(code) if products(way) == kernel.weights * kernel.rows]
    if len(loops) != 1:
        raise UserError(
            f"{kernel.function}: {len(loops)} loops of {len(named)} functions multiply {kernel.weights} weights by "
            f"{kernel.rows} rows; one must: see how {compiled.name} was compiled"
        )
    return loops[0]


def products(way: Sequence[str]) -> int:
    return sum(PRODUCTS.get(text.split()[0], 0) for text in way)


def cycles(way: Sequence[str], cpu: str) -> tuple[float, float]:
    """Of one turn: cycles by the model, and those in which its busiest unit is busy."""
    target = ["-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", f"-iterations={TURNS}", "-json"]
    found = json.loads(command(MODEL, *target, given="\n".join(way)))["CodeRegions"][0]
    summary, pressure = found["SummaryView"], found["ResourcePressureView"]["ResourcePressureInfo"]
    if summary["Instructions"] != TURNS * len(way):
        raise UserError(f"{MODEL} took {summary['Instructions'] // TURNS} of {len(way)} instructions for {cpu}")
    # What comes after the last instruction is the sum of all.
    busiest = max(unit["ResourceUsage"] for unit in pressure if unit["InstructionIndex"] == len(way))
    return summary["TotalCycles"] / TURNS, busiest


def cycles_per_weight(compiled: Path, kernel: Kernel, cpu: str) -> tuple[float, float]:
    took, busy = cycles(turn(compiled, kernel), cpu)
    return took / kernel.weights, busy / kernel.weights


def compiled(source: Path, folder: str, *options: str) -> Path:
    made = Path(folder) / f"{source.stem}.o"
    command(COMPILER, *FLAGS, *options, "-c", str(source), "-o", str(made))
    return made


def measure(llama_cpp: Path | None) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        ours = {name: compiled(SOURCES / "kernels" / "arm" / file, folder) for name, file in FILES.items()}
        theirs = {name: their_object(llama_cpp, name, folder) for name in FILES} if llama_cpp else {}
        for cpu, sets in SETS.items():
            for kind, format, rows in [(s, f, r) for s in sets for f in FORMATS for r in (1, 4, 8)]:
                passes = max(1, rows // MOST)
                kernel = our_kernel(kind, format, rows // passes)
                took, busy = (passes * c for c in cycles_per_weight(ours[kind], kernel, cpu))
                row = dict(cpu=cpu, set=kind, format=format, rows=rows, ours=took, busy=busy)
                if llama_cpp:
                    their = their_kernel(kind, format, rows // passes)
                    theirs_took, their_busy = (passes * c for c in cycles_per_weight(theirs[kind], their, cpu))
                    row |= {"theirs": theirs_took, "their busy": their_busy, "ratio": theirs_took / took}
                yield row


def their_object(llama_cpp: Path, instruction_set: str, folder: str) -> Path:
    source = llama_cpp / GGML / "arch" / "arm" / "repack.cpp"
    if not source.is_file():
        raise UserError(
            f"--llama-cpp {llama_cpp}: no {source.relative_to(llama_cpp)} in it; name llama.cpp's top folder"
        )
    ggml = llama_cpp / "ggml"
    includes = [f"-I{path}" for path in (ggml / "include", ggml / "src", llama_cpp / GGML)]
    (inside := Path(folder) / instruction_set).mkdir()
    return compiled(source, str(inside), f"-march=armv8.2-a+fp16+{FEATURES[instruction_set]}", *includes)


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--llama-cpp", type=Path, help="a folder with llama.cpp's sources")
    args = parser.parse_args(argv)
    rows = printed(measure(args.llama_cpp), COLUMNS + (THEIR_COLUMNS if args.llama_cpp else ()))
    write_rows(args.json, rows)


if __name__ == "__main__":
    run_main(main)
