"""What `import umbra` and the chat make of a model's answer, with a model whose words are given."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.engine.request import Event
from tests.text.checkpoints import write_tokenizer
from tests.text.test_chat import OUTPUTS, TOOLS, USER
from tests.tiny import save_tiny, write_case
from text.parser import Answer, ToolCall
from umbra import LLM, Chat, SamplingParams
from umbra import chat as chat_module
from umbra.session import Prompt, Session

pytestmark = pytest.mark.slow

FAMILIES = ["minimax_m2", "qwen3"]
SHORT = SamplingParams(max_tokens=2)


def open_llm(folder: Path, family: str, **settings: object) -> LLM:
    vocabulary = write_tokenizer(folder / "model", family, tags_are_special=True)
    save_tiny(folder / "model", vocab_size=vocabulary, eos_token_id=None, max_position_embeddings=1024)
    sections = {"data_config": {"input_max_len": 600}, "model_config": {"tokenizer_mode": "chat"}}
    path = write_case(folder / "case.yaml", folder / "model", **sections)
    return LLM(path, **settings)


def let_say(session: Session, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every request be answered with `text`, a token at a time."""

    def follow(id: int) -> Iterator[Event]:
        ids = [*session.tokenizer.encode(text, chat=False), session.tokenizer.hf.eos_token_id]
        yield from (Event(id, (token,), "stop" if i == len(ids) - 1 else "") for i, token in enumerate(ids))

    monkeypatch.setattr(session, "_follow", follow)


EXPECTED = Answer(
    "look",
    "One moment.",
    (ToolCall("weather", '{"city": "Zürich", "days": 2}'), ToolCall("weather", "{}")),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_have_reasoning_content_and_calls(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(tmp_path, family)
    let_say(llm.session, OUTPUTS[family], monkeypatch)
    (out,) = llm.generate([Chat([USER], TOOLS)], SHORT)
    assert out.text == OUTPUTS[family]
    assert out.answer == EXPECTED
    assert Answer.of(llm.parts(Chat([USER], TOOLS), SHORT)) == EXPECTED
    assert "".join(llm.stream(Chat([USER], TOOLS), SHORT)) == OUTPUTS[family]
    prompts: list[Prompt] = ["hi", [USER]]  # without tools, what would call them is text
    for out in llm.generate(prompts, SHORT):
        assert out.answer.reasoning == "look"
        assert out.answer.content == OUTPUTS[family].partition("</think>\n\n")[2]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reasoning": "inline"}, Answer("", "<think>look\n</think>\n\nOne moment.", EXPECTED.tool_calls)),
        ({"output_format": "none"}, Answer("", OUTPUTS["minimax_m2"])),
    ],
)
def test_a_case_may_say_how_answers_are_read(
    tmp_path: Path, settings: dict[str, object], expected: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(tmp_path, "minimax_m2", **settings)
    let_say(llm.session, OUTPUTS["minimax_m2"], monkeypatch)
    assert llm.generate([Chat([USER], TOOLS)], SHORT)[0].answer == expected


def test_a_request_ends_when_its_parts_are_closed(tmp_path: Path) -> None:
    llm = open_llm(tmp_path, "qwen3")
    parts = llm.parts("hi", SamplingParams(max_tokens=40, ignore_eos=True))
    next(parts)
    assert len(llm.session.loop.scheduler.running) == 1
    parts.close()
    assert not llm.session.loop.scheduler.running


def test_ctrl_c_stops_a_chat_also_while_nothing_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = open_llm(tmp_path, "minimax_m2").session
    let_say(session, "look\n\n\n\n", monkeypatch)
    pieces, stream = [], session.stream

    def interrupted(prompt: Prompt) -> Iterator[str]:
        for piece in stream(prompt):
            pieces.append(piece)
            if piece == "\n":  # which is held back: it may be layout
                signal.raise_signal(signal.SIGINT)
            yield piece

    monkeypatch.setattr(session, "stream", interrupted)
    assert chat_module._answer(session, [USER]) == {"role": "assistant", "content": "", "reasoning_content": "look\n"}
    assert pieces == [*"look\n"]
    assert capsys.readouterr().out.endswith("look\n [stopped]\n\n")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_chat_shows_reasoning_apart_and_sends_it_back_as_reasoning(
    tmp_path: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = open_llm(tmp_path, "minimax_m2").session
    let_say(session, "look\n</think>\n\nIt rains.", monkeypatch)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    lines = iter(["hi", "and now?", "/quit"])
    seen: list[Prompt] = []
    encode = session.encode
    monkeypatch.setattr(session, "encode", lambda prompt: seen.append(list(prompt)) or encode(prompt))
    monkeypatch.setattr(chat_module.Session, "open", lambda *given: session)
    monkeypatch.setattr(chat_module, "_read", lambda: None if (line := next(lines)) == "/quit" else line)
    chat_module.chat("case", [])
    out = capsys.readouterr().out
    assert out.replace("\033[2m", "").replace("\033[0m", "").count("look\n\nIt rains.\n\n") == 2
    assert ("\033[2mlook" in out.replace("\033[0m\033[2m", "")) is terminal
    said = {"role": "assistant", "content": "It rains.", "reasoning_content": "look"}
    assert seen[-1] == [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "and now?"}]
