"""Perplexity of a case's model on a text, in windows that do not overlap.

    .venv/bin/python tools/evaluate.py --case demo --set method=q4 --text checkpoints/austen_moe/held_out.txt

Every window starts anew, so its first token is not counted. Works on every platform, exec mode, split and quantisation.
"""

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from errors import UserError, run_main
from executor.cases import load_case, load_model_config, model_folder
from executor.env import RankEnv, rank_env
from executor.launch import launch
from executor.model_runner import ModelRunner
from executor.rank import run_rank
from executor.results import write_json
from executor.runners import make_runner
from executor.tokenizer import Tokenizer
from tools.logits import prefill_logits, with_room


def evaluate(runner: ModelRunner, ids: list[int], window: int) -> dict[str, Any]:
    """Mean loss in nats over every token that has one before it in its window."""
    windows = [ids[i : i + window] for i in range(0, len(ids), window)]
    windows = [w for w in windows if len(w) > 1]
    batch_size = runner.case.data_config.batch_size
    total, count = 0.0, 0
    for start in range(0, len(windows), batch_size):
        part = windows[start : start + batch_size]
        for row, logits in zip(part, prefill_logits(runner, part), strict=True):
            losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(row[1:]), reduction="sum")
            total, count = total + float(losses), count + len(row) - 1
    loss = total / count
    return {"tokens": count, "loss": loss, "perplexity": math.exp(loss)}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override keys")
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 text file")
    parser.add_argument("--window", type=int, default=256, help="tokens of one window")
    parser.add_argument("--batch", type=int, default=8, help="windows run together")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--results", type=Path, help="folder for the ranks' logs")
    args = parser.parse_args(argv)
    if args.window < 2 or args.batch < 1:
        raise UserError(f"--window {args.window} must be at least 2, --batch {args.batch} at least 1")
    case = with_room(load_case(args.case, args.set), args.batch, args.window, new_tokens=1)
    load_model_config(case)
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {args.text}: not readable: {error}") from None
    if case.world_size > 1 and not rank_env().launched:
        return launch(case, [os.path.abspath(__file__), *argv])

    def run(results: Path, ranks: RankEnv) -> None:
        ids = Tokenizer(model_folder(case)).encode(text, chat=False)
        if len(ids) < 2:
            raise UserError(f"--text {args.text}: fewer than two tokens")
        runner = make_runner(case, results, ranks)
        runner.setup()
        figures = {"case": case.name, "quantization": case.quantization.method, **evaluate(runner, ids, args.window)}
        if ranks.rank == 0:
            print(
                f"{figures['tokens']} tokens: loss {figures['loss']:.4f} nats, perplexity {figures['perplexity']:.3f}"
            )
            if args.json:
                write_json(args.json, figures)

    run_rank(case, args.results, run)


if __name__ == "__main__":
    run_main(main)
