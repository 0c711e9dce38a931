"""Writes the files that both servers of tools/benchmarks/serving.py load: random weights of a case's shapes, and a
tokenizer.

    .venv/bin/umbra bench serving_files FOLDER [--case bench_30b_shape_cpu] [--format q4|q8]

FOLDER/model has config.json and a tokenizer for Umbra, whose random weights need no file; FOLDER/model.gguf has the
same weights and tokenizer for llama-server. The tokenizer is the demo's, filled up with words to the model's
vocabulary, so that every token that a random model chooses has a text.
"""

import argparse
import json
import os
import shutil
import string
from pathlib import Path

from umbra.base.errors import run_main
from umbra.base.files import ROOT, write_json
from umbra.executor.config.env import rank_env
from umbra.executor.config.load import load_case, load_model_config, model_folder
from umbra.executor.model_runner import make_runner
from umbra.tools.benchmarks.gguf_file import write_gguf

TOKENIZER = ROOT / "checkpoints/austen_moe"


def word(number: int) -> str:
    """A word of its own for each number, as a byte-level vocabulary writes one after a space."""
    letters = ""
    while number or not letters:
        number, digit = divmod(number, 26)
        letters = string.ascii_lowercase[digit] + letters
    return f"\u0120{letters}q"


def write_tokenizer(folder: Path, size: int) -> None:
    """The demo's tokenizer with `size` tokens; no text is encoded in those beyond the demo's."""
    data = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, number = data["model"]["vocab"], 0
    while len(vocab) < size:
        text = word(number)
        number += 1
        if text not in vocab:
            vocab[text] = len(vocab)
    write_json(folder / "tokenizer.json", data)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder / name)


def write_files(folder: Path, case_name: str, format: str) -> None:
    model, gguf = folder / "model", folder / "model.gguf"
    model.mkdir(parents=True, exist_ok=True)
    case = load_case(case_name, [f"method={format}"])
    config = load_model_config(case)
    shutil.copy(model_folder(case) / "config.json", model)
    write_tokenizer(model, config.vocab_size)
    runner = make_runner(load_case(case_name, [f"method={format}", f"model_path={model}"]), folder, rank_env())
    runner.setup()
    unfinished = gguf.with_suffix(".part")
    write_gguf(unfinished, runner.engine.model, runner.config, model)
    os.replace(unfinished, gguf)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", default="bench_30b_shape_cpu")
    parser.add_argument("--format", choices=("q4", "q8"), default="q4")
    args = parser.parse_args(argv)
    write_files(args.folder.resolve(), args.case, args.format)


if __name__ == "__main__":
    run_main(main)
