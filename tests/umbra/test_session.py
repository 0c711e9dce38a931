"""A session's requests, with a loop and a tokenizer that are made up: a token is a letter."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from executor.config.load import load_case, model_folder
from executor.engine.request import Event, Request, SamplingParams
from text.chat import Chat
from text.parser import Part
from umbra import session as module
from umbra.errors import UserError
from umbra.session import Session, stop_strings


class Letters:
    template = ""

    def __init__(self) -> None:
        self.chats: list[Any] = []

    def encode(self, text: str, chat: bool) -> list[int]:
        self.chats.append((text, chat))
        return [*map(ord, text)]

    def encode_chat(self, chat: Chat) -> list[int]:
        return [ord("c")] * sum(len(str(message["content"])) for message in chat.messages)

    def opens_reasoning(self, prompt: list[int]) -> bool:
        return False

    def detokenizer(self) -> Any:
        return SimpleNamespace(push=lambda tokens: "".join(map(chr, tokens)), rest=lambda: "~")


class Loop:
    """Answers each request with a letter a step, from `says` in the order of submission."""

    def __init__(self, *says: str):
        self.says, self.requests, self.aborted = list(says), list[Request](), list[int]()
        self.refused = 99
        self.given: list[int] = []

    def submit(self, request: Request) -> Any:
        if len(self.requests) == self.refused:
            raise UserError("refused")
        self.requests.append(request)
        self.given.append(0)
        return SimpleNamespace(id=len(self.requests) - 1 + 10)

    def step(self) -> list[Event]:
        events = [Event(77, (1,), "")]  # of another caller, who does not wait any more
        for number, text in enumerate(self.says[: len(self.requests)]):
            if number + 10 not in self.aborted and (at := self.given[number]) < len(text):
                self.given[number] += 1
                events.append(Event(number + 10, (ord(text[at]),), "length" if at == len(text) - 1 else ""))
        return events

    def abort(self, id: int) -> None:
        self.aborted.append(id)


def opened(*says: str, overrides: Sequence[str] = ()) -> Any:
    session: Any = Session.__new__(Session)
    session.case = load_case("demo", ["output_format=none", "input_max_len=8", "max_new_tokens=4", *overrides])
    session.tokenizer, session.loop, session._events = Letters(), Loop(*says), {}
    session.runner = SimpleNamespace(
        request=lambda index, ids, most: Request(tuple(ids), SamplingParams(max_tokens=most, seed=index))
    )
    return session


def test_replies_come_in_the_order_of_the_prompts() -> None:
    session = opened("xyz", "uvw")
    first, second = session.generate(["ab", [99, 100]])
    assert (first.prompt, first.text, first.tokens, first.finish_reason) == ("ab", "xyz~", [120, 121, 122], "length")
    assert (second.prompt, second.text, second.tokens) == ("", "uvw~", [117, 118, 119])
    assert (first.answer.content, first.answer.reasoning) == ("xyz~", "")
    assert [request.ids for request in session.loop.requests] == [(97, 98), (99, 100)]
    assert [(r.sampling.max_tokens, r.sampling.seed) for r in session.loop.requests] == [(4, 0), (4, 1)]
    assert session.loop.aborted == [10, 11]
    assert session._events == {}
    assert session.generate([]) == []


def test_a_stop_string_ends_a_reply() -> None:
    session = opened("abXYc", "abc")
    one, two = session.generate(["q", "q"], stop="XY")
    assert (one.text, one.finish_reason, one.tokens) == ("ab", "stop", [*map(ord, "abXY")])
    assert (two.text, two.finish_reason) == ("abc~", "length")
    assert [reply.text for reply in opened("ab").generate(["q"], stop=["b~", "c"])] == ["a"]
    assert [reply.text for reply in opened("ab").generate(["q"], stop=["~!"])] == ["ab~"]  # held back to the end


def test_settings_are_one_for_all_or_one_for_each() -> None:
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    for given, found in ((one, [one, one]), ([one, two], [one, two])):
        session = opened("a", "b")
        session.generate(["q", "q"], given)
        assert [request.sampling for request in session.loop.requests] == found
    session = opened()
    with pytest.raises(UserError, match=r"^sampling: 1 settings for 2 prompts: give one for each, or one$"):
        session.generate(["q", "q"], [one])
    with pytest.raises(UserError, match=r"^prompts: 'q' is one text: give a list of prompts$"):
        session.generate("q")
    with pytest.raises(UserError, match=r"^stop: \[''\] must be a string or several, none of them empty$"):
        session.generate(["q"], stop=[""])
    assert not session.loop.requests


def test_if_one_prompt_cannot_run_none_does() -> None:
    session = opened("a", "b")
    session.loop.refused = 2
    with pytest.raises(UserError, match=r"^refused$"):
        session.generate(["q", "q", "q"])
    assert session.loop.aborted == [10, 11]
    assert session._events == {}


@pytest.mark.parametrize(("length", "wanted", "most"), [(8, 4, 4), (9, 4, 3), (11, 4, 1), (12, 4, 4), (8, 3, 3)])
def test_answers_end_where_sequences_do(length: int, wanted: int, most: int) -> None:
    """A prompt without room for a token is left to the engine, which refuses it."""
    session = opened("a")
    session.generate(["q" * length], SamplingParams(max_tokens=wanted))
    assert session.loop.requests[0].sampling.max_tokens == most


def test_a_stream_ends_its_request_when_it_is_closed() -> None:
    session = opened("xyz", "abc")
    stream = session.stream("q")
    assert session.loop.requests  # it waits already
    assert next(stream) == "x"
    assert session.loop.aborted == []
    stream.close()
    assert (session.loop.aborted, session._events) == ([10], {})
    assert list(session.stream("q", SamplingParams(max_tokens=3))) == ["a", "b", "c~"]
    assert session.loop.aborted == [10, 11]
    assert list(opened("aXb").stream("q", stop=["Xb"])) == ["a"]  # pieces without text are left out


def test_parts_of_an_answer() -> None:
    session = opened("xyz", "abc")
    parts = session.parts("q")
    assert next(parts) == Part("content", "x")
    parts.close()
    assert session.loop.aborted == [10]
    found = list(session.parts("q", stop="c"))
    assert "".join(part.text for part in found) == "ab"
    assert session.parser("q").whole("text").content == "text"


def test_prompts_are_texts_chats_or_tokens() -> None:
    session = opened()
    assert session.encode("ab") == [97, 98]
    assert session.tokenizer.chats == [("ab", False)]
    assert opened(overrides=["tokenizer_mode=chat"]).encode("ab") == [97, 98]
    chat = opened(overrides=["tokenizer_mode=chat"])
    chat.encode("ab")
    assert chat.tokenizer.chats == [("ab", True)]
    messages: Any = [{"role": "user", "content": "abc"}]
    assert session.encode(messages) == session.encode(Chat(messages)) == [99] * 3
    assert session.encode((1, 2)) == [1, 2]
    assert session.encode([]) == []
    for odd in ([1, "a"], [True], [1, {}], [2.5]):
        with pytest.raises(UserError, match=r"is neither a text nor token ids nor a list of messages$"):
            session.encode(odd)
    session.check_chat()
    assert session.tokenizer.chats[-1] == ("Hello", True)


def test_the_oldest_turns_are_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    session, said = opened(), "(the oldest turn is forgotten: the conversation is longer than input_max_len)\n"

    def turns(*sizes: int) -> list[Any]:
        return [{"role": "user", "content": "x" * size} for size in sizes]

    for sizes, kept, times in (
        ((4, 4), 2, 0),
        ((1, 4, 4), 1, 1),
        ((3, 3, 3, 3, 2), 3, 1),
        ((9,), 1, 0),
        ((9, 9), 0, 1),
    ):
        made = turns(*sizes)
        assert session.shortened(made) == made[len(made) - kept :]
        assert capsys.readouterr().out == said * times


def test_the_parser_knows_the_tools_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened()
    made: Any = []
    monkeypatch.setattr(module, "answer_parser", lambda *given: (made.append(given), "parser")[1])
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    messages: Any = [{"role": "user", "content": "ab"}]
    assert session.parser(Chat(messages, tools)) == session.parser(messages) == "parser"
    assert made == [(session.case, session.tokenizer, [99, 99], given) for given in (tools, ())]
    made.clear()
    session.parts("q")
    monkeypatch.setattr(module, "answer_parser", lambda *given: (made.append(given), SimpleNamespace(whole=str))[1])
    session.loop.says = ["a", "b"]
    session.generate([Chat(messages, tools)])
    assert [given[2:] for given in made] == [([ord("q")], ()), ([99, 99], tools)]


def test_several_ranks_are_refused_and_a_session_is_set_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = load_case("demo")
    with pytest.raises(UserError, match=r"^case demo: world_size: 2: this runs on one rank: .* bash infer\.sh demo$"):
        Session(replace(case, world_size=2))
    done: Any = []
    runner = SimpleNamespace(config=SimpleNamespace(vocab_size=5), setup=lambda: done.append("setup"), loop="loop")
    monkeypatch.setattr(module, "check_ready", done.append)
    monkeypatch.setattr(module, "make_runner", lambda *given: (done.append(given[0]), runner)[1])
    monkeypatch.setattr(module, "Tokenizer", lambda *given: (done.append(given), "tokenizer")[1])
    session: Any = Session(case)
    assert done == [case, case, (model_folder(case), 5), "setup"]
    assert (session.loop, session.tokenizer, session.runner, session._events) == ("loop", "tokenizer", runner, {})


def test_a_model_is_a_case_or_a_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(Session, "__init__", lambda self, case: made.append(case))
    monkeypatch.setattr(module, "case_of_checkpoint", lambda *given: ("folder", *given))
    monkeypatch.setattr(module, "load_case", lambda *given: ("case", *given))
    (tmp_path / "odd.yaml").mkdir()
    for model in (str(tmp_path), str(tmp_path / "odd.yaml"), "demo"):
        Session.open(model, {"a": 1}, ["b=2"])
    assert made == [
        ("folder", tmp_path, {"a": 1}, ["b=2"]),
        ("case", str(tmp_path / "odd.yaml"), ["b=2"], {"a": 1}),
        ("case", "demo", ["b=2"], {"a": 1}),
    ]


def test_stop_strings_are_one_or_several() -> None:
    assert stop_strings("ab") == ["ab"]
    assert stop_strings(("a", "b")) == ("a", "b")
    assert stop_strings(()) == ()
    for odd in ("", ["a", ""], [1]):
        with pytest.raises(UserError):
            stop_strings(odd)  # type: ignore[arg-type]
