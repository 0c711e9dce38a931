"""Answers as `import umbra` gives them, from a model whose words are given."""

import json
import re
from pathlib import Path

import pytest

from tests.text.checkpoints import write_tokenizer
from tests.text.test_chat import OUTPUTS, TOOLS, USER
from tests.tiny import save_tiny, write_case
from umbra import LLM, Chat, SamplingParams
from umbra.executor.engine.schedule.request import Grammar
from umbra.text.answer import Answer, ToolCall

pytestmark = pytest.mark.slow

FAMILIES = ["minimax_m2", "qwen3"]


def open_llm(folder: Path, family: str, **settings: object) -> LLM:
    vocabulary = write_tokenizer(folder / "model", family, tags_are_special=True)
    save_tiny(folder / "model", vocab_size=vocabulary, eos_token_id=None, max_position_embeddings=1024)
    sections = {
        "data_config": {"input_max_len": 600, "max_new_tokens": 400},
        "model_config": {"tokenizer_mode": "chat"},
    }
    path = write_case(folder / "case.yaml", folder / "model", **sections)
    return LLM(path, **settings)


def saying(text: str) -> SamplingParams:
    """Sampling whose grammar leaves no other answer than `text`, in which marks are tokens of their own."""
    parts = re.split(r"(</?(?:think|tool_call|minimax:tool_call)>|<\|.*?\|>)", text)
    said = (json.dumps(part, ensure_ascii=False) if i % 2 == 0 else part for i, part in enumerate(parts) if part)
    return SamplingParams(max_tokens=400, grammar=Grammar("lark", f"start: {' '.join(said)}"))


EXPECTED = Answer(
    "look", "One moment.", (ToolCall("weather", '{"city": "Zürich", "days": 2}'), ToolCall("weather", "{}"))
)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_have_reasoning_content_and_calls(tmp_path: Path, family: str) -> None:
    llm, sampling, chat = open_llm(tmp_path, family), saying(OUTPUTS[family]), Chat([USER], TOOLS)
    (out,) = llm.generate([chat], sampling)
    assert (out.text, out.answer) == (OUTPUTS[family], EXPECTED)
    assert Answer.of(llm.parts(chat, sampling)) == EXPECTED
    assert "".join(llm.stream(chat, sampling)) == OUTPUTS[family]
    (out,) = llm.generate([[USER]], sampling)  # without tools, what would call them is text
    assert (out.answer.reasoning, out.answer.content) == ("look", OUTPUTS[family].partition("</think>\n\n")[2])


def test_answers_whose_marks_are_tokens(tmp_path: Path) -> None:
    text = "<|channel|>analysis<|message|>look<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    text += '<|constrain|>json<|message|>{"days": 2}'
    llm, chat = open_llm(tmp_path, "harmony"), Chat([USER], TOOLS)
    expected = Answer("look", "", (ToolCall("weather", '{"days": 2}'),))
    (out,) = llm.generate([chat], saying(text), stop="final")
    assert (out.text, out.answer) == (text, expected)
    assert Answer.of(llm.parts(chat, saying(text))) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reasoning": "inline"}, Answer("", "<think>look\n</think>\n\nOne moment.", EXPECTED.tool_calls)),
        ({"output_format": "none"}, Answer("", OUTPUTS["minimax_m2"])),
    ],
)
def test_a_case_may_say_how_answers_are_read(tmp_path: Path, settings: dict[str, object], expected: Answer) -> None:
    llm = open_llm(tmp_path, "minimax_m2", **settings)
    assert llm.generate([Chat([USER], TOOLS)], saying(OUTPUTS["minimax_m2"]))[0].answer == expected
