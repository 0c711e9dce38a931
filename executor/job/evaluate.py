"""Perplexity of a case's model on a text, in windows that do not overlap; with --against, also what it differs by.

    .venv/bin/python executor/job/evaluate.py --case demo --set method=q4 --text checkpoints/austen_moe/held_out.txt
    ... --against demo --against-set method=none     # KL(none || q4) in nats, and how often both prefer the same token

Every window starts anew, so its first token is not counted in the perplexity. Works on every platform, exec mode, split
and quantisation. With --against there are two passes, a process each: the first runs the other case and leaves its
logits in a temporary folder (TMPDIR says where), vocabulary x 4 bytes for a token; the second runs the case itself
and compares. KL and agreement are over every position. Memory, beside the model: about three times --batch x --window
x vocabulary x 4 bytes on each rank, however long the text.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from errors import UserError, run_main
from executor.checkpoint.tokenizer import Tokenizer
from executor.config.case import Case
from executor.config.env import RankEnv, rank_env
from executor.config.load import load_case, load_model_config, model_folder
from executor.job.divergence import Divergence, LogitsWriter
from executor.job.launch import launch
from executor.job.logits import prefill_logits, with_room
from executor.job.rank import run_rank
from executor.job.runner import ModelRunner, make_runner
from files import write_json

LOGITS, FIGURES = "logits.f32", "figures.json"  # what the first pass leaves in the temporary folder
COLUMNS = ("case", "quantization", "tokens", "loss", "perplexity", "KL (nats)", "top-1 (%)")

Figures = dict[str, Any]


def evaluate(
    runner: ModelRunner, windows: list[list[int]], visit: Callable[[torch.Tensor], None] | None = None
) -> Figures:
    """Mean loss in nats over every token that has one before it in its window.

    `visit` is given the logits of each window, (tokens, vocabulary), in order.
    """
    batch_size = runner.case.data_config.batch_size
    total, count = 0.0, 0
    for start in range(0, len(windows), batch_size):
        part = windows[start : start + batch_size]
        for row, logits in zip(part, prefill_logits(runner, part), strict=True):
            losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(row[1:]), reduction="sum")
            total, count = total + float(losses), count + len(row) - 1
            if visit:
                visit(logits)
    loss = total / count
    return {"tokens": count, "loss": loss, "perplexity": math.exp(loss)}


def read_windows(case: Case, path: Path, size: int) -> list[list[int]]:
    """The token ids of the text, cut; a last window of a single token is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path}: not readable: {error}") from None
    ids = Tokenizer(model_folder(case), load_model_config(case).vocab_size).encode(text, chat=False)
    if len(ids) < 2:
        raise UserError(f"--text {path}: fewer than two tokens")
    return [ids[i : i + size] for i in range(0, len(ids), size) if i + 1 < len(ids)]


def compare(case: Case, other: Case, args: argparse.Namespace, argv: list[str]) -> None:
    """Both passes, one after the other."""
    windows = read_windows(case, args.text, args.window)
    sizes = {load_model_config(c).vocab_size for c in (case, other)}
    if len(sizes) > 1 or read_windows(other, args.text, args.window) != windows:
        raise UserError(
            f"--against {args.against}: its vocabulary is not that of {args.case}: the tokenizer and vocab_size of "
            f"{model_folder(other)} and {model_folder(case)} must be the same"
        )
    needed = sum(map(len, windows)) * sizes.pop() * torch.float32.itemsize
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the folder goes then too
    with tempfile.TemporaryDirectory(prefix="umbra-evaluate-") as folder:
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"--against {args.against}: its logits take {needed / 1e9:.2f} GB, {folder} has {free / 1e9:.2f} GB "
                "free: shorten --text, or set TMPDIR to a folder on a larger disk"
            )
        print(f"first {other.name}: its logits take {needed / 1e9:.2f} GB in {folder} until the end", flush=True)
        first = [f"--case={args.against}", *(f"--set={pair}" for pair in args.against_set), f"--text={args.text}"]
        first += [f"--window={args.window}", f"--batch={args.batch}", f"--json={folder}/{FIGURES}"]
        run_pass([*first, f"--logits={folder}"])
        run_pass([*argv, f"--logits={folder}"])


def run_pass(arguments: list[str]) -> None:
    """This program once more; if it fails, it has said why."""
    child = subprocess.Popen([sys.executable, os.path.abspath(__file__), *arguments])
    try:
        status = child.wait()
    except BaseException:  # we are told to end: so is the pass, which ends its ranks
        child.terminate()
        child.wait()
        raise
    if status:
        sys.exit(status if status > 0 else 128 - status)


def table(rows: list[Figures]) -> str:
    """The other case first, then the one that is compared."""
    lines = [COLUMNS]
    for row in rows:
        line = (row["case"], row["quantization"], str(row["tokens"]), f"{row['loss']:.4f}", f"{row['perplexity']:.3f}")
        both = (f"{row['kl_divergence']:.6f}", f"{row['top1_agreement']:.2f}") if "against" in row else ("-", "-")
        lines.append(line + both)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def run_case(case: Case, args: argparse.Namespace) -> None:
    """One pass over the text."""

    def run(results: Path, ranks: RankEnv) -> None:
        windows = read_windows(case, args.text, args.window)
        runner = make_runner(case, results, ranks)
        runner.setup()
        visit: LogitsWriter | Divergence | None = None
        if args.logits and ranks.rank == 0:
            visit = Divergence(args.logits / LOGITS) if args.against else LogitsWriter(args.logits / LOGITS)
        figures = {"case": case.name, "quantization": case.quantization.method, **evaluate(runner, windows, visit)}
        if ranks.rank > 0:
            return
        if isinstance(visit, Divergence):
            figures |= visit.figures() | {"against": json.loads((args.logits / FIGURES).read_text())}
            print(table([figures["against"], figures]))
        else:
            print(
                f"{figures['tokens']} tokens: loss {figures['loss']:.4f} nats, perplexity {figures['perplexity']:.3f}"
            )
        if args.json:
            write_json(args.json, figures)

    run_rank(case, args.results, run)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override keys")
    parser.add_argument("--against", metavar="CASE", help="compare with this case, normally the one in bfloat16")
    parser.add_argument("--against-set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="its keys")
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 text file")
    parser.add_argument("--window", type=int, default=256, help="tokens of one window")
    parser.add_argument("--batch", type=int, default=8, help="windows run together")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--results", type=Path, help="folder for the ranks' logs")
    # Of the two passes: without --against the logits are written there, with it they are read.
    parser.add_argument("--logits", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.window < 2 or args.batch < 1:
        raise UserError(f"--window {args.window} must be at least 2, --batch {args.batch} at least 1")
    if args.against_set and not args.against:
        raise UserError("--against-set: belongs to --against CASE, which is missing")

    def load(name: str, overrides: list[str]) -> Case:
        case = with_room(load_case(name, overrides), args.batch, args.window, new_tokens=1)
        load_model_config(case)
        return case

    case = load(args.case, args.set)
    if args.against and not args.logits:
        return compare(case, load(args.against, args.against_set), args, argv)
    if case.world_size > 1 and not rank_env().launched:
        return launch(case, [os.path.abspath(__file__), *argv])
    run_case(case, args)


if __name__ == "__main__":
    run_main(main)
