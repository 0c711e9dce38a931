"""Every target by its name."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.target import Target

PLACES = {
    "header": "checkpoints",
    "index": "checkpoints",
    "config": "checkpoints",
    "generation": "checkpoints",
    "quantization": "checkpoints",
    "case": "checkpoints",
    "gguf": "gguf",
    "tokenizer": "texts",
    "tiktoken": "texts",
    "tokenizer_config": "texts",
    "template": "texts",
    "answer": "texts",
    "chat": "requests",
    "completion": "requests",
    "response": "requests",
    "message": "requests",
    "tokenization": "requests",
    "http": "requests",
}
CORPUS = Path(__file__).with_name("corpus")


def maker(name: str) -> Callable[[Path], Target]:
    maker_of_target: Callable[[Path], Target] = getattr(importlib.import_module(f"tests.fuzz.{PLACES[name]}"), name)
    return maker_of_target


def corpus(name: str) -> list[bytes]:
    """The committed inputs of a target, beside its seeds: a file of Python's bytes, one a line, with comments."""
    path = CORPUS / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [ast.literal_eval(line) for line in lines if not line.startswith("#")]
