"""Conversations with gpt-oss: what its template gets, and answers read by their tokens, also malformed ones."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.text.checkpoints import TEMPLATES, id_of, write_tokenizer
from tests.text.test_parser import TOOLS, streamed
from umbra.base.errors import UserError
from umbra.executor.checkpoint.stop_ids import stop_ids
from umbra.models.registry import conventions
from umbra.models.tokenizers import tokenizer_in
from umbra.text.answer import Answer, Part, ToolCall
from umbra.text.chat import Chat
from umbra.text.formats import Mark
from umbra.text.harmony import LONGEST_HEADER, Harmony
from umbra.text.parser import reader as reader_of
from umbra.text.stops import Stops
from umbra.text.tokenizer import Tokenizer

HARMONY = conventions().formats["harmony"]
USER = {"role": "user", "content": "hi"}


def pieces(text: str) -> list[str]:
    """Marks, and texts between them."""
    parts = re.split(f"({'|'.join(map(re.escape, HARMONY.tokens))})", text)
    return [Mark(part) if i % 2 else part for i, part in enumerate(parts) if part]


def answer(reasoning: str = "", content: str = "", *calls: tuple[str, str]) -> Answer:
    return Answer(reasoning, content, tuple(ToolCall(*call) for call in calls))


A, C, F = "<|channel|>analysis<|message|>", "<|channel|>commentary", "<|channel|>final<|message|>"
ON = "<|end|><|start|>assistant"
CASES = {
    "reasoning": (f"{A}hm{ON}{F}Yes.<|return|>", answer("hm", "Yes.")),
    "preamble and call": (
        f'{A}a{ON}{C}<|message|>I look.{ON}{C} to=functions.f <|constrain|>json<|message|>{{"i": 1}}<|call|>',
        answer("a", "I look.", ("f", '{"i": 1}')),
    ),
    "recipient in the role, calls in a row": (
        f'{A}a{ON} to=functions.f{C} json<|message|>{{"i": 1}}{ON} to=functions.g{C}<|message|><|call|>',
        answer("a", "", ("f", '{"i": 1}'), ("g", "{}")),
    ),
    "at once to a tool": (f" to=functions.g{C}<|message|>{{}}", answer("", "", ("g", "{}"))),
    "call on analysis": ("<|channel|>analysis to=functions.g code<|message|>{}", answer("", "", ("g", "{}"))),
    "built-in tool": ("<|channel|>analysis to=python code<|message|>1+1<|call|>", answer("1+1")),
    "unknown tool": (f"{C} to=functions.h<|message|>{{}}{ON}{F}x", answer("", "x")),
    "several of a kind": (f"{A}a{ON}{A}b{ON}{C}<|message|>c{ON}{F}d", answer("a\nb", "c\nd")),
    # What made others fail.
    "no header": ("It is a nice day.", answer("", "It is a nice day.")),
    "short, no header": ("Hi", answer("", "Hi")),
    "text behind a message": (f'{A}a<|end|>{{"country": "France"}}<|return|>', answer("a", '{"country": "France"}')),
    "no start": (f"{A}a<|end|>assistant{F}b", answer("a", "b")),
    "no end": (f"{A}a<|start|>assistant{F}b<|channel|>analysis<|message|>c", answer("a\nc", "b")),
    "no message mark": (f"{A}a{ON}<|channel|>finalHello.<|return|>", answer("a", "Hello.")),
    "no message mark in a call": (f"{C} to=functions.g <|constrain|>json{{}}<|call|>", answer("", "", ("g", "{}"))),
    "no text of a call": (f"{C} to=functions.g <|call|>", answer("", "", ("g", "{}"))),
    "only a role": ("<|start|>assistant Hello<|return|>", answer("", " Hello")),
    "words in a header": ("<|channel|>––commentary to=functions.g ––x<|message|>{}", answer("", "", ("g", "{}"))),
    "free text for a channel": (f"<|channel|>?? so be it{ON}{F}x", answer("", "?? so be it\nx")),
    "two channels": (f"{C} to=assistant{C}?{C}?<|message|>x", answer("", "x")),
    "to the user": (f"{C} to=user<|message|>x", answer("", "x")),
    "empty": ("<|channel|><|message|><|return|>", answer()),
    "after the end": (f"{F}x<|return|>commentary<|message|>y", answer("", "x\ncommentary\ny")),
}


@pytest.mark.parametrize("name", CASES)
def test_rules(name: str) -> None:
    text, expected = CASES[name]
    assert Harmony(TOOLS).whole(*pieces(text)) == expected


def test_without_tools_and_inline() -> None:
    text = pieces(f"{A}a{ON}{C} to=functions.g <|constrain|>json<|message|>{{}}<|call|>")
    assert Harmony().whole(*text) == answer("a", "{}")
    assert Harmony(split=False).whole(*text) == answer("", "<think>a</think>\n{}")


@pytest.mark.parametrize("begun", ["<|start|>assist", "<|channel|>fin", f"{C} to=f <|constrain|>js", " to=fu"])
def test_a_header_that_the_limit_cuts_off_is_no_text(begun: str) -> None:
    assert Harmony(TOOLS).whole(*pieces(begun), cut=True) == answer()


BITS = [*map(Mark, HARMONY.tokens)] * 2 + [
    "assistant",
    "analysis",
    "commentary",
    "final",
    " to=functions.g",
    " to=x",
    "json",
    "{}",
    " ",
    "\n",
    "x",
    "é",
    "<|channel|>",
    " " * LONGEST_HEADER,
]


@given(st.lists(st.sampled_from(BITS) | st.text(max_size=3), max_size=20), st.booleans(), st.booleans())
def test_any_cuts_of_any_output_change_nothing(said: list[str], split: bool, tools: bool) -> None:
    def read(pieces: Iterable[str]) -> list[Part]:
        return streamed(Harmony(TOOLS if tools else [], split), pieces)

    whole: list[str] = []
    for bit in said:
        apart = not whole or isinstance(bit, Mark) or isinstance(whole[-1], Mark)
        whole[len(whole) - (not apart) :] = [bit if apart else whole[-1] + bit]
    parts = read(whole)
    assert read(said) == parts
    assert read(piece for bit in said for piece in ([bit] if isinstance(bit, Mark) else bit)) == parts
    assert sum(part.kind == "end" for part in parts) == len(Answer.of(parts).tool_calls) <= tools * len(said)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("harmony")
    return tokenizer_in(folder, write_tokenizer(folder, "harmony"))


def test_marks_are_tokens_and_their_letters_are_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.format("auto") is tokenizer.format("harmony") is HARMONY
    letters = [id_of(tokenizer, token) for token in list("<|end|>")]
    ids = [
        *tokenizer.encode(f"{A}é<|endoftext|>{ON}{F}", chat=False),
        *letters,
        *tokenizer.encode("<|end|>", chat=False),
    ]
    for stops, content in ((["final", "asst"], "<|end|>"), (["end|"], "<|")):
        detokenizer, cut = tokenizer.detokenizer(), Stops(stops)
        reader = reader_of(HARMONY, [], False, True)
        parts = [p for id in ids for piece in cut.pieces(detokenizer.pieces([id])) for p in reader.push(piece)]
        assert Answer.of([*parts, *reader.finish()]) == answer("é", content)
    assert tokenizer.decode(ids) == f"{A}é{ON}{F}<|end|><|end|>"


def test_the_format_needs_the_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "qwen3", chat_template=TEMPLATES["harmony"])
    tokenizer = tokenizer_in(tmp_path)
    assert tokenizer.format("auto") is None
    with pytest.raises(UserError, match=r"output_format: harmony: .* has not all of the special tokens <\|start"):
        tokenizer.format("harmony")
    assert not stop_ids(tmp_path, (7,)) - {7}


def test_its_ends_count_whatever_a_checkpoint_says(tokenizer: Tokenizer) -> None:
    """Early files of gpt-oss lack <|call|>."""
    ends = [id_of(tokenizer, token) for token in ["<|return|>", "<|call|>", "<|endoftext|>"]]
    assert stop_ids(tokenizer.folder, (7,)) == {7, *ends}


def call(id: str, name: str = "f") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"i": 1}'}}


LOOP: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "system", "content": "T"},
    USER,
    {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call("a"), call("b", "g")]},
    {"role": "tool", "tool_call_id": "b", "content": "two"},
    {"role": "tool", "tool_call_id": "a", "content": "one"},
]


def test_what_the_template_gets(tokenizer: Tokenizer) -> None:
    told = {"model_identity": "I am.", "reasoning_effort": "low", "builtin_tools": ["python"]}
    text = tokenizer.whole_text(tokenizer.encode_chat(Chat(LOOP, TOOLS, told)))
    assert text.startswith("<|start|>system<|message|>I am.\n20")
    assert "\nReasoning: low\n## python<|end|><|start|>developer<|message|>S\n\nT// \ntype f = s: string, " in text
    loop = text.partition("user<|message|>hi<|end|>")[2]
    calls = [
        f'<|start|>assistant to=functions.{name}{C} json<|message|>{{"i": 1}}<|call|>'
        f'<|start|>functions.{name} to=assistant{C}<|message|>"{result}"<|end|>'
        for name, result in (("f", "one"), ("g", "two"))
    ]
    assert loop == f"<|start|>assistant{A}hm\n\nI look.<|end|>{''.join(calls)}<|start|>assistant"
    # Without ids, results have the order of the calls.
    bare = [{key: value for key, value in message.items() if key != "tool_call_id"} for message in LOOP]
    bare[3]["tool_calls"] = [{"function": call["function"]} for call in bare[3]["tool_calls"]]
    bare[4:] = bare[5], bare[4]
    assert tokenizer.whole_text(tokenizer.encode_chat(Chat(bare, TOOLS, told))) == text
    later = tokenizer.encode_chat(Chat([*LOOP, {"role": "assistant", "content": "ok", "reasoning": "no"}, USER], TOOLS))
    assert tokenizer.whole_text(later).endswith(
        f"{''.join(calls)}<|start|>assistant{F}ok<|end|><|start|>user<|message|>hi<|end|><|start|>assistant"
    )
    assert "hm" not in tokenizer.whole_text(later)
    with pytest.raises(UserError, match="template failed: marks of channels in content"):
        tokenizer.encode_chat(Chat([USER, {"role": "assistant", "content": "<|channel|>"}, USER]))
