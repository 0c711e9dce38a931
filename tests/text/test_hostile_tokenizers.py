"""A tokenizer of a stranger works, or is refused in one line when it is loaded."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from tests.text.checkpoints import write_tokenizer
from text.tokenizer import Tokenizer
from umbra.errors import UserError


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": parts}


def template(ids: list[int], times: int = 1, known: str = "X") -> dict[str, Any]:
    text, special = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "X", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    token = {"id": known, "ids": ids, "tokens": ["x"] * len(ids)}
    parts = {"single": [special] * times + [text], "pair": [text, second], "special_tokens": {known: token}}
    return {"type": "TemplateProcessing"} | parts


STRANGE: dict[str, tuple[dict[str, Any], str]] = {
    "replaced by much": ({"normalizer": replace("b" * 1000, String="a")}, "normalizer: .* 32 times as long"),
    "doubled often": ({"normalizer": sequence(*[replace("aa", String="a")] * 40)}, "normalizer: .* 32 times as long"),
    "much between letters": ({"normalizer": replace("b" * 1000, Regex="")}, "normalizer: .* 32 times as long"),
    "an expression for answers": ({"decoder": replace("b", Regex="a+")}, "decoder: a regular expression"),
    "many parts": ({"normalizer": sequence(*[{"type": "NFC"}] * 100)}, "normalizer: has 101 parts, more than 64"),
    "a table": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}}, "Precompiled is not supported",
    ),
    "a special token of many ids": ({"post_processor": template([1] * 1000)}, "adds 1000 ids to each text"),
    "a special token that is not there": ({"post_processor": template([1], known="Y")}, "tokenizer"),
    "ids beyond the vocabulary": ({"post_processor": template([4_000_000_000])}, "outside vocab_size"),
    "no expression": ({"pre_tokenizer": split("(")}, "tokenizer not readable"),
    "a long end of words": (
        {"model": {"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": "x" * 1000}}, "longer than 64",
    ),
    "deep lists": ({"normalizer": json.loads("[" * 500 + "]" * 500)}, "tokenizer not readable"),
}  # fmt: skip


def change(folder: Path, **parts: Any) -> int:
    """Writes a tokenizer with other `parts`. -> size of its vocabulary"""
    size = write_tokenizer(folder, "qwen3")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return size


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the first tokenizer of a process imports takes seconds and memory of its own."""
    folder = tmp_path_factory.mktemp("good")
    Tokenizer(folder, write_tokenizer(folder, "qwen3"))


@pytest.mark.parametrize("name", STRANGE)
def test_strange_tokenizers_are_one_line(tmp_path: Path, name: str) -> None:
    parts, complaint = STRANGE[name]
    size = change(tmp_path, **parts)
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=complaint) as raised:
        Tokenizer(tmp_path, size)
    assert "\n" not in str(raised.value)
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 << 10  # KB


def test_what_only_some_texts_provoke_is_one_line(tmp_path: Path) -> None:
    """Rust's panics are no Exception in Python."""
    tokenizer = Tokenizer(tmp_path, change(tmp_path, pre_tokenizer=split(r"(a+)+$")))
    assert tokenizer.encode("some text", chat=False)
    with pytest.raises(UserError, match=r"tokenizer failed: .*retry-limit-in-match over"):
        tokenizer.encode("a" * 50 + "!", chat=False)
    cut = {"type": "Strip", "content": "a", "start": 1 << 40, "stop": 1 << 40}
    tokenizer = Tokenizer(tmp_path, change(tmp_path, decoder=cut))
    with pytest.raises(UserError, match="tokenizer failed: index out of bounds"):
        tokenizer.decode(tokenizer.encode("a", chat=False))


UNIGRAM = {"type": "Unigram", "unk_id": 0, "byte_fallback": False}
SLOW: dict[str, tuple[dict[str, Any], str]] = {
    "long tokens": (
        {"model": UNIGRAM | {"vocab": [["<u>", 0.0], *(["a" * i, -1.0] for i in range(1, 3000))]}}, "a" * 300_000,
    ),
    "an expression at each letter": ({"pre_tokenizer": split("a*a*a*[bc]")}, ("a" * 300 + "\n") * 30 + "b"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "long tokens" else [pytest.mark.thorough]) for name in SLOW]
)
def test_what_takes_long_is_ended(tmp_path: Path, name: str) -> None:
    """Each would take minutes. What follows is encoded again."""
    parts, text = SLOW[name]
    tokenizer = Tokenizer(tmp_path, change(tmp_path, **parts))
    short = tokenizer.encode("aab", chat=False)
    start = time.process_time()
    with pytest.raises(UserError, match=r"tokenizer failed: it takes more than .* s or .* MB for \d+ characters"):
        tokenizer.encode(text, chat=False)
    assert time.process_time() - start < 1
    assert tokenizer.encode("aab", chat=False) == short == list(tokenizer.hf("aab")["input_ids"])


def test_a_template_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "qwen3", chat_template=None)
    path = tmp_path / "tokenizer_config.json"
    for wrong in (5, ["x"], {"default": 5}, [{"name": "default"}], True):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": wrong}))
        with pytest.raises(UserError, match="tokenizer not readable"):
            Tokenizer(tmp_path)
