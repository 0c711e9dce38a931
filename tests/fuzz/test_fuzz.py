"""Every target takes its corpus, some changes of it, and inputs as large as they may be: docs/reliability.md."""

import json
import mmap
import random
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fuzz.mutation import mutated
from tests.fuzz.target import Bounds, Target, Violation
from tests.fuzz.targets import CORPUS, PLACES, corpus, maker
from tests.variants import thorough_but

MOST = 40  # changed inputs of each target
MB = 1 << 20
VALUES = {
    "lists": b"[" + b"[]," * (MB // 2) + b"0]",
    "mappings": b"[" + b'{"a":0},' * (MB // 4) + b"0]",
    "strings": b"[" + b'"ab",' * (MB // 4) + b"0]",
    "numbers": b"[" + b"1e5," * (MB // 4) + b"9" * 4000 + b"]",
    "keys": b"{" + b",".join(b'"k%d":0' % i for i in range(100_000)) + b"}",
    "deep": b"[" * MB + b"]" * MB,
    "wide": b'"' + b"x" * MB + "\U0001f642".encode() + b'"',
}
AROUND = {
    "header": b'{"a": %b}',
    "index": b'{"weight_map": %b}',
    "config": b'{"model_type": "qwen3_moe", "eos_token_id": %b}',
    "generation": b'{"eos_token_id": %b}',
    "quantization": b'{"quant_method": "awq", "group_size": 128, "modules_to_not_convert": %b}',
    "tokenizer": b'{"model": {"type": "BPE", "vocab": {}, "merges": []}, "normalizer": %b}',
    "tokenizer_config": b'{"chat_template": %b}',
    "chat": b'{"messages": %b}',
    "completion": b'{"prompt": %b}',
    "response": b'{"input": %b}',
    "message": b'{"max_tokens": 1, "messages": %b}',
}


def bounds_of(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Bounds:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return Bounds(maker(name), folder)


@pytest.mark.parametrize("name", PLACES)
def test_the_corpus(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus has inputs that once failed, and the seeds, which `Bounds` runs."""
    bounds = bounds_of(name, monkeypatch, tmp_path)
    for data in corpus(name):
        bounds(data)


@pytest.mark.parametrize("name", thorough_but(PLACES, "config", "tokenizer", "chat", "http"))
def test_changes_of_the_corpus(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Always the same ones."""
    bounds = bounds_of(name, monkeypatch, tmp_path)
    target, rng = bounds.target, random.Random(0)
    seeds = target.seeds + corpus(name)
    for _ in range(MOST):
        data = mutated(rng.choice(seeds), seeds, target.json, target.longest, rng)
        try:
            bounds(data)
        except BaseException:
            print(f"the input: {data!r}", file=sys.stderr)
            raise


@pytest.mark.thorough
@pytest.mark.parametrize("name", AROUND)
def test_the_largest_inputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = bounds_of(name, monkeypatch, tmp_path)
    for what, value in VALUES.items():
        data = AROUND[name] % value
        if name == "header":
            data = len(data).to_bytes(8, "little") + data
        try:
            bounds(data)
        except Violation as error:
            raise Violation(f"{what}: {error}") from None


@pytest.mark.thorough
def test_the_largest_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One character beyond the others makes all of a text take four bytes."""
    bounds = bounds_of("config", monkeypatch, tmp_path)
    for wide in ("\U0001f642".encode(), b"\\ud83d\\ude42"):
        bounds(b'{"model_type": "qwen3_moe", "x": "%b"}' % (b"x" * 23 * MB + wide))


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda data: [None for _ in iter(int, 1)], "s of CPU"),
        (lambda data: mmap.mmap(-1, 64 * MB).write(b"x" * 64 * MB), "MB of memory"),  # fresh pages
        (lambda data: Path(tempfile.mkstemp()[1]), "left behind"),
        (lambda data: json.loads("{"), "Expecting property name"),
    ],
)
def test_every_bound_is_noticed(run: object, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = bounds_of("generation", monkeypatch, tmp_path)
    bounds.target = Target(run, [])  # type: ignore[arg-type]
    monkeypatch.setattr("tests.fuzz.target.CPU_S", 0.1 if said == "s of CPU" else 100.0)
    monkeypatch.setattr("tests.fuzz.target.MEMORY", 16 * MB)
    with pytest.raises((Violation, ValueError), match=said):
        bounds(bytes(MB))


def test_the_corpus_is_small_and_known() -> None:
    inputs = list(CORPUS.iterdir())
    assert {path.name for path in inputs} <= set(PLACES)
    assert sum(path.stat().st_size for path in inputs) < 300_000
    assert all(corpus(path.name) for path in inputs)
