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

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machine_code import FORMATS, SOURCES, Architecture, Kernel, compiled, cycles, turn
from benchmarks.output import Row, flags, printed, write_rows
from errors import UserError, run_main

COMPILER = "aarch64-linux-gnu-g++"
MOST = 4  # rows of a pass, in both
GGML = Path("ggml") / "src" / "ggml-cpu"
FEATURES = {"neon_dotprod": "dotprod", "neon_i8mm": "dotprod+i8mm"}
FILES = {"neon_dotprod": "neon.cpp", "neon_i8mm": "i8mm.cpp"}
SETS = {
    "tsv110": ["neon_dotprod"],
    "neoverse-n1": ["neon_dotprod"],
    "neoverse-n2": ["neon_dotprod", "neon_i8mm"],
    "neoverse-v2": ["neon_dotprod", "neon_i8mm"],
}
PRODUCTS = {"sdot": 16, "smmla": 32}  # multiplications of an instruction
ARM = Architecture(
    "aarch64-linux-gnu",
    "//",
    re.compile(r"b(\.\w+)?$|cbn?z$|tbn?z$"),
    frozenset(("b", "br", "ret")),
    lambda text: PRODUCTS.get(text.split()[0], 0),
    turns=1000,
)
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


def cycles_per_weight(made: Path, kernel: Kernel, cpu: str) -> tuple[float, float]:
    took, busy = cycles(turn(made, kernel, ARM), cpu, ARM)
    return took / kernel.weights, busy / kernel.weights


def measure(llama_cpp: Path | None) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        ours = {name: compiled(COMPILER, SOURCES / "kernels" / "arm" / file, folder) for name, file in FILES.items()}
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
    return compiled(COMPILER, source, str(inside), f"-march=armv8.2-a+fp16+{FEATURES[instruction_set]}", *includes)


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--llama-cpp", type=Path, help="a folder with llama.cpp's sources")
    args = parser.parse_args(argv)
    rows = printed(measure(args.llama_cpp), COLUMNS + (THEIR_COLUMNS if args.llama_cpp else ()))
    write_rows(args.json, rows)


if __name__ == "__main__":
    run_main(main)
