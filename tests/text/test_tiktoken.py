"""Tokenizers of Kimi: ranks become the tokens that tiktoken gives, and wrong files are one line."""

import base64
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import Regex, pre_tokenizers

from umbra.base.errors import UserError
from umbra.executor.checkpoint.stop_ids import stop_ids
from umbra.models.deepseek.text import KIMI
from umbra.models.registry import conventions
from umbra.models.tokenizers import open_tokenizer, tokenizer_in
from umbra.text.tokenizer import Tokenizer
from umbra.text.tokenizer_sandbox import is_linear

JOINED = [
    "ab",
    "ba",
    "aba",
    "abab",
    "bab",
    " a",
    "\n\n",
    "12",
    "123",
    "你好",
    "好世",
    "é",
    "'s",
    "a's",
    "世界你好",
    "aab",
    "aa",
]
RANKS = list(
    dict.fromkeys([*(bytes([i]) for i in range(255, -1, -1)), "你".encode()[:2], *(j.encode() for j in JOINED)])
)
SPECIAL = {"[BOS]": len(RANKS), "<|im_end|>": len(RANKS) + 2}
SETTINGS: dict[str, Any] = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "added_tokens_decoder": {str(id): {"content": text, "special": True} for text, id in SPECIAL.items()},
    "bos_token": "[BOS]",
    "eos_token": "<|im_end|>",
}


def lines(ranks: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))


def write(folder: Path, ranks: bytes, **settings: Any) -> Path:
    (folder / "tiktoken.model").write_bytes(ranks)
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS | settings))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_in(write(tmp_path_factory.mktemp("kimi"), lines(RANKS)))


def split(text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizers.Split(Regex(KIMI), "isolated").pre_tokenize_str(text)]


def ids_of(piece: bytes) -> list[int]:
    """As tiktoken does: the neighbours of the lowest rank are joined, the first of equal ones."""
    ranks = {token: rank for rank, token in enumerate(RANKS)}
    parts = [piece] if piece in ranks else [piece[i : i + 1] for i in range(len(piece))]
    while True:
        joined = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not joined:
            return [ranks[part] for part in parts]
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(st.lists(st.sampled_from([*JOINED, *"abA' \r\n1!", "\u0300", "々", "カ", "🙂", "ǅ", *SPECIAL])).map("".join))
def test_tokens_are_those_of_tiktoken(tokenizer: Tokenizer, text: str) -> None:
    expected: list[int] = []
    for part in re.split(r"(\[BOS\]|<\|im_end\|>)", text):
        pieces = [] if part in SPECIAL else split(part)
        expected += [SPECIAL[part]] if part in SPECIAL else [id for piece in pieces for id in ids_of(piece.encode())]
    assert tokenizer.encode(text, chat=False) == expected
    assert tokenizer.whole_text(expected) == text


def test_what_the_files_say(tokenizer: Tokenizer) -> None:
    assert split("中文English混合's 1234かな漢字") == ["中文", "English", "混合", "'s", " ", "123", "4", "かな", "漢字"]
    assert is_linear(tokenizer.backend, conventions().expressions)
    assert stop_ids(tokenizer.folder, ()) == {SPECIAL["<|im_end|>"]}
    assert tokenizer.whole_text([SPECIAL["[BOS]"] + 1]) == f"<|reserved_token_{len(RANKS) + 1}|>"
    assert tokenizer.hidden == {len(RANKS), len(RANKS) + 1, len(RANKS) + 2}
    assert open_tokenizer(tokenizer.folder, needed=False)


WRONG: dict[str, tuple[Callable[[list[bytes]], bytes], dict[str, Any]]] = {
    "line 2 must have .* new bytes in base64 and their rank, 1": (lambda r: lines(r).replace(b" 1\n", b" 7\n"), {}),
    "line 274 must have 1 to 256 new bytes": (lambda r: lines([*r[:273], b"a" * 257]), {}),
    "tiktoken.model: .* larger than 4 MB": (lambda r: lines(r) + b"\n" * (4 << 20), {}),
    "base64|Only": (lambda r: lines(r) + b"\xff 9", {}),
    "has no token of the byte 0": (lambda r: lines(r[:255]), {}),
    "line 275 must": (lambda r: lines([*r, b"a"]), {}),
    "tokenizer_class 'Other': how it splits": (lines, {"tokenizer_class": "Other"}),
    "added_tokens_decoder: 5 must be from": (lines, {"added_tokens_decoder": {"5": {"content": "x"}}}),
    "'a' is empty or stands twice": (lines, {"added_tokens_decoder": {str(len(RANKS)): {"content": "a"}}}),
    "Expected `object`, got `null`": (lines, {"added_tokens_decoder": None}),
    "Git LFS pointer": (lambda _: b"version https://git-lfs.github.com/spec/v1\n", {}),
}


@pytest.mark.parametrize("complaint", WRONG)
def test_wrong_files_are_one_line(tmp_path: Path, complaint: str) -> None:
    ranks, settings = WRONG[complaint]
    with pytest.raises(UserError, match=complaint) as raised:
        tokenizer_in(write(tmp_path, ranks(RANKS), **settings))
    assert "\n" not in str(raised.value)
