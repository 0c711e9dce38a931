"""Quantises a Qwen3-MoE checkpoint to 4 bits, in the "gemm" format of AutoAWQ.

    umbra quantize --model checkpoints/austen_moe --out checkpoints/austen_moe_awq --group 32 --calibrate TEXT.txt

Without --calibrate, weights are rounded to the nearest step; with it, they are scaled first as AWQ does, so that what
the text makes large loses least. The same command goes on after an interruption. Attention and expert projections are
quantised; embedding, head, router and norms stay as they are.
"""

import argparse
from pathlib import Path

from errors import UserError, run_main
from executor.quantize.convert import Calibration, convert
from executor.quantize.source import Source
from ops.format import GROUP_SIZES

TOKENS = 8192


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a float checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder to write: new, or left by the same command")
    parser.add_argument("--group", type=int, choices=GROUP_SIZES, default=128, help="columns that share a scale")
    parser.add_argument("--calibrate", type=Path, metavar="TEXT", help="a UTF-8 text like those the model will see")
    parser.add_argument("--tokens", type=int, help=f"how much of the text to use at most (default {TOKENS})")
    args = parser.parse_args(argv)
    if args.tokens is not None and (args.calibrate is None or args.tokens < 2):
        raise UserError(f"--tokens {args.tokens}: must be at least 2, and needs --calibrate")
    calibration = Calibration(args.calibrate, args.tokens or TOKENS) if args.calibrate else None
    convert(Source(args.model), args.out, args.group, calibration)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    run_main(main)
