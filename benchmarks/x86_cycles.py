"""Cycles of the quantised x86 kernels by llvm-mca, a static model: no measurement.

    .venv/bin/python -m benchmarks.x86_cycles [--json FILE]

Loops are found as benchmarks.arm_cycles finds them. LLVM's models know no costs of AMX: there an instruction on tiles
takes a slot of any port. So a load of a tile is given to them as as many loads as it has rows, a store as as many
stores, and products and clearing are left out: counted apart is that the matrix unit starts a product every 16 cycles.
With AMX the weights are unpacked and the activations gathered before their products; both loops are added as if nothing
of them ran beside the products.

A row, of the table and of `rows` in the JSON file:
  cpu      by LLVM's name. Its model of sapphirerapids has one unit for 512-bit products, as client CPUs do; that of
           skylake-avx512 has the two that servers have, but takes four instructions a cycle and not six
  set      the instruction set, by our name
  format   q4 or q8
  rows     activation rows
  cycles   a weight: for all rows, averaged over many turns of the loop
  busy     cycles a weight in which the model's busiest unit is busy, that for matrices included
  macs     multiply-adds a cycle
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.machine_code import (
    FORMATS,
    SOURCES,
    Architecture,
    Kernel,
    compiled,
    cycles,
    functions,
    inner_loops,
    turn,
)
from benchmarks.output import Row, flags, printed, write_rows
from errors import UserError, run_main

COMPILER = "g++"
FILES = {"avx2": "avx2.cpp", "avx_vnni": "avx_vnni.cpp", "avx512_vnni": "avx512.cpp", "amx": "amx.cpp"}
SERVERS, CLIENTS = ("sapphirerapids", "skylake-avx512"), ("alderlake",)
SETS = {**dict.fromkeys(CLIENTS, ("avx2", "avx_vnni")), **dict.fromkeys(SERVERS, ("avx512_vnni", "amx"))}
ROWS = {"avx2": (1, 4), "avx_vnni": (1, 4), "avx512_vnni": (1, 4, 16, 64), "amx": (16, 64)}
MATRIX_CYCLES = 16  # between products of two tiles
# As in amx.cpp: row blocks at once, steps of 32 columns in a chunk, rows of a tile of activations and of weights.
BLOCKS, STEPS, TILE_ROWS, WEIGHT_TILE = 4, 4, 16, 8
COLUMNS = (
    ("cpu", "cpu", 15, ""),
    ("set", "set", 13, ""),
    ("format", "format", 8, ""),
    ("rows", "rows", 6, ""),
    ("cycles", "cycles", 9, ".4f"),
    ("busy", "busy", 9, ".4f"),
    ("macs", "macs", 8, ".1f"),
)


def mnemonic(text: str) -> str:
    return next(word for word in text.split() if not word.startswith("{"))


def products_of(text: str) -> int:
    match mnemonic(text):
        case "vpdpbusd":
            return 64 if "%zmm" in text else 32
        case "vpmaddubsw":
            return 32
        case "tdpbssd":
            return TILE_ROWS * 16 * 32
    return 0


# What follows an indirect jump (jmpq) is taken for one of its targets, as it is in a switch.
X86 = Architecture(
    "x86_64-linux-gnu", "#", re.compile(r"j\w+$"), frozenset(("jmp", "retq", "ud2")), products_of, turns=200
)


def without_tiles(way: Sequence[str]) -> list[str]:
    """With what instructions on tiles do to memory in their place."""
    plain = []
    for text in way:
        name = mnemonic(text)
        place = re.search(r"\([^)]*\)", text)
        if name == "tileloadd" and place:
            activations = re.search(r"%tmm[0-3]$", text)  # loaded once for all row blocks
            rows = TILE_ROWS // BLOCKS if activations else WEIGHT_TILE
            plain += [f"prefetcht0 {place[0]}"] * rows  # a load without a register to put it in
        elif name == "tilestored" and place:
            plain += [f"movq %rsp, {place[0]}"] * TILE_ROWS
        elif name != "tilezero" and not name.startswith("tdp"):
            plain.append(text)
    return plain


def x86_kernel(instruction_set: str, format: str, rows: int) -> Kernel:
    """A kernel that takes `rows` in one pass or, with the sets of 512 bits, in several."""
    if instruction_set == "amx":
        return Kernel(f"tiles_pass<(umbra::Format){FORMATS[format]}>", 16 * 32 * STEPS, TILE_ROWS)
    if instruction_set == "avx512_vnni" and rows >= 4:
        lines = {"q4": 8, "q8": 16}[format] // min(rows // 4, 4)  # fetched in a turn, as in avx512.cpp
        return Kernel(f"quantised_pair<(umbra::Format){FORMATS[format]}, false, 4, {lines}>", 2 * 16 * 32, 4)
    weights = (16 if instruction_set == "avx512_vnni" else 8) * 32
    return Kernel(f"quantised_pass<(umbra::Format){FORMATS[format]}, false, {rows}>", weights, rows)


def longest_loop(made: Path, function: str) -> list[str]:
    loops = [way for name, code in functions(made, X86).items() if function in name for way in inner_loops(code)]
    if not loops:
        raise UserError(f"{function}: no loop in {made.name}; see how it was compiled")
    return max(loops, key=len)


def cycles_per_weight(made: Path, instruction_set: str, format: str, rows: int, cpu: str) -> tuple[float, float]:
    kernel = x86_kernel(instruction_set, format, rows)
    passes, way = rows // kernel.rows, turn(made, kernel, X86)
    took, busy = cycles(without_tiles(way), cpu, X86)
    if instruction_set != "amx":
        return passes * took / kernel.weights, passes * busy / kernel.weights
    matrix = MATRIX_CYCLES * sum(mnemonic(text) == "tdpbssd" for text in way)
    took, busy = passes * max(took, matrix) / kernel.weights, passes * max(busy, matrix) / kernel.weights
    # A turn unpacks 16 x 32 weights, for all rows, or gathers four rows of 32 columns, for all row blocks.
    for function, times in ((f"unpack<(umbra::Format){FORMATS[format]}>", 1), ("gather(", rows / 4 / BLOCKS)):
        other, other_busy = cycles(longest_loop(made, function), cpu, X86)
        took, busy = took + times * other / (16 * 32), busy + times * other_busy / (16 * 32)
    return took, busy


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        made = {name: compiled(COMPILER, SOURCES / "kernels" / "x86" / file, folder) for name, file in FILES.items()}
        for cpu, sets in SETS.items():
            for kind, format, rows in [(s, f, r) for s in sets for f in FORMATS for r in ROWS[s]]:
                took, busy = cycles_per_weight(made[kind], kind, format, rows, cpu)
                yield dict(cpu=cpu, set=kind, format=format, rows=rows, cycles=took, busy=busy, macs=rows / took)


def main(argv: list[str]) -> None:
    args = flags(__doc__).parse_args(argv)
    write_rows(args.json, printed(measure(), COLUMNS))


if __name__ == "__main__":
    run_main(main)
