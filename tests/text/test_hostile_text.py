"""Tokenizers and chat templates of strangers work, or are refused in one line."""

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from tests.text.checkpoints import write_tokenizer
from umbra.base.errors import UserError
from umbra.models.tokenizers import tokenizer_in
from umbra.text.template import TOO_MUCH, Renderer, variables_of


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": parts}


STRANGE: dict[str, tuple[dict[str, Any], str]] = {
    "replaced by much": ({"normalizer": replace("b" * 1000, String="a")}, "normalizer: .* 32 times as long"),
    "an expression for answers": ({"decoder": replace("b", Regex="a+")}, "decoder: a regular expression"),
    "many parts": ({"normalizer": sequence(*[{"type": "NFC"}] * 100)}, "normalizer: has 101 parts, more than 64"),
    "deep lists": ({"normalizer": json.loads("[" * 500 + "]" * 500)}, "tokenizer not readable"),
}


def change(folder: Path, **parts: Any) -> int:
    """Writes a tokenizer with other `parts`. -> size of its vocabulary"""
    size = write_tokenizer(folder, "qwen3")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return size


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Imports the modules that the first tokenizer of a process needs, which take seconds and memory of their own."""
    folder = tmp_path_factory.mktemp("good")
    tokenizer_in(folder, write_tokenizer(folder, "qwen3"))


@pytest.mark.parametrize("name", STRANGE)
def test_strange_tokenizers_are_one_line(tmp_path: Path, name: str) -> None:
    parts, complaint = STRANGE[name]
    size = change(tmp_path, **parts)
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=complaint) as raised:
        tokenizer_in(tmp_path, size)
    assert "\n" not in str(raised.value)
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 << 10  # KB


def test_what_only_some_texts_provoke_is_one_line(tmp_path: Path) -> None:
    """Rust's panics are no Exception in Python."""
    tokenizer = tokenizer_in(tmp_path, change(tmp_path, pre_tokenizer=split(r"(a+)+$")))
    assert tokenizer.encode("some text", chat=False)
    with pytest.raises(UserError, match=r"tokenizer failed: .*retry-limit-in-match over"):
        tokenizer.encode("a" * 50 + "!", chat=False)
    cut = {"type": "Strip", "content": "a", "start": 1 << 40, "stop": 1 << 40}
    tokenizer = tokenizer_in(tmp_path, change(tmp_path, decoder=cut))
    with pytest.raises(UserError, match="tokenizer failed: index out of bounds"):
        tokenizer.decode(tokenizer.encode("a", chat=False))


UNIGRAM = {"type": "Unigram", "unk_id": 0, "byte_fallback": False}


def test_what_takes_long_is_ended(tmp_path: Path) -> None:
    """It would take minutes. What follows is encoded again."""
    vocabulary = [["<u>", 0.0], *(["a" * i, -1.0] for i in range(1, 3000))]
    tokenizer = tokenizer_in(tmp_path, change(tmp_path, model=UNIGRAM | {"vocab": vocabulary}))
    short = tokenizer.encode("aab", chat=False)
    start = time.process_time()
    with pytest.raises(UserError, match=r"tokenizer failed: it takes more than .* s or .* MB for \d+ characters"):
        tokenizer.encode("a" * 300_000, chat=False)
    assert time.process_time() - start < 20
    assert tokenizer.encode("aab", chat=False) == short == tokenizer.backend.encode("aab").ids


def test_a_template_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "qwen3", chat_template=None)
    path = tmp_path / "tokenizer_config.json"
    for wrong in (5, ["x"], {"default": 5}, [{"name": "default"}], True):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": wrong}))
        with pytest.raises(UserError, match="tokenizer not readable"):
            tokenizer_in(tmp_path)


HOSTILE = {
    "loops": ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", TOO_MUCH),
    "multiplied": ("{{ 'a' * 10 ** 11 }}", TOO_MUCH),
    "longer than its input": ("{{ 'a' * 10 ** 7 }}", "it makes 10000000 characters of"),
    "endless recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth exceeded"),
    "classes": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    "a list that changes": ("{{ messages.append(1) }}", "access to attribute 'append' of 'list'"),
    "other files": ("{% include '/etc/passwd' %}", "no loader for this environment"),
}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_one_line(renderer: Renderer, name: str) -> None:
    source, complaint = HOSTILE[name]
    before = os.times()
    with pytest.raises(UserError, match=r"^the checkpoint's chat template failed: ") as raised:
        renderer.render(source, {"messages": []})
    after = os.times()
    assert complaint in str(raised.value)
    assert after.user + after.children_user - before.user - before.children_user < 2


def test_the_next_conversation_is_rendered(renderer: Renderer) -> None:
    """Also after one that has ended the process."""
    assert renderer.render("{{ a }}", {"a": "b\ud800"}).text == "b\ud800"
    with pytest.raises(UserError):
        renderer.render(*HOSTILE["loops"][:1], {})
    assert renderer.render("{{ a }}", {"a": 1}).text == "1"


def test_templates_see_what_transformers_shows_them(renderer: Renderer) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x", "name": None},
        {"role": "assistant", "reasoning": "r", "content": "y"},
    ]
    variables = variables_of(messages, {"eos_token": "<e>", "tools": None})
    source = (
        "{%- for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% if loop.last %}{% break %}"
        "{% endif %}{% endfor %}{{ dict(a=1) }}{{ tools is none }}{{ add_generation_prompt }}{{ eos_token }}"
    )
    assert renderer.render(source, variables).text == (
        '{"role": "user", "content": "x"}{"thinking": "r", "role": "assistant", "reasoning": "r", "content": "y", '
        '"reasoning_content": "r"}{\'a\': 1}TrueTrue<e>'
    )
    assert renderer.render("{{ strftime_now('%Y') }}", {}).text == time.strftime("%Y")
    assert renderer.render("{% set n = namespace(a=1, b=2) %}{% set n.a = 5 %}{{ n.a + n.b }}", {}).text == "7"
    ascii = "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}"
    assert renderer.render(ascii, {}).text == '{"a":"\\u00e9","b":1}'
    with pytest.raises(UserError, match="failed: no system message"):
        renderer.render("{{ raise_exception('no system message') }}", {})
