"""What requests are before they run: prompts, settings, and what is wrong with them by name, without a server."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from executor.config.load import load_case
from serving.api import anthropic, openai_chat, openai_completions, responses, tokenizing
from serving.api.errors import ApiError
from serving.api.front import Job, Text
from serving.api.openai_chat import Chat, ChatRequest
from serving.api.openai_completions import Completion
from serving.ranks.messages import Grammar, Ready
from tests.serving.api.front import family_tokenizer
from text import chat as conversations
from text.formats import FORMATS
from umbra.errors import UserError

NOW = 1234567.9
HEX = "[0-9a-f]{24}"
HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "go"}}


class Front:
    """What requests ask of the front."""

    name = "m"

    def __init__(self, family: str, longest: int = 500):
        self.case = load_case("demo_chat")
        tokenizer = family_tokenizer(family)
        ends = [tokenizer.hf.eos_token_id]
        self.ready = Ready(longest, 4, tokenizer.backend.get_vocab_size(), 16, 64, 1, ends, 100.0)
        self.text = Text(self.case, tokenizer)
        self.models: list[str | None] = []

    def check_serving(self) -> tuple[Ready, Text]:
        return self.ready, self.text

    def check_model(self, name: str | None) -> None:
        self.models.append(name)
        if name == "wrong":
            raise ApiError(404, "there is no such model", "model")

    async def work(self, call: Callable[[], Any]) -> Any:
        return call()


Checks = list[tuple[Grammar, str, Grammar | None]]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    """The grammars that were checked, by their fields, with the parts of them that the request has."""
    found: Checks = []

    def check(grammar: Grammar, param: str, text: Any, ready: Any, wanted: Grammar | None = None) -> None:
        assert (type(text), type(ready)) == (Text, Ready)
        found.append((grammar, param, wanted))

    monkeypatch.setattr(openai_chat, "check_grammar", check)
    monkeypatch.setattr(openai_completions, "check_grammar", check)
    monkeypatch.setattr(Text, "mark_ids", lambda self, ready: {})
    monkeypatch.setattr("time.time", lambda: NOW)
    return found


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each time that the bytes of tokens were asked for: the model."""
    found: list[Any] = []
    monkeypatch.setattr(Text, "grammars", lambda self, ready: found.append(ready))
    return found


def chat(front: Any, salt: bytes = b"s", **fields: Any) -> Chat:
    made: Chat = asyncio.run(openai_chat.prepare(front, {"messages": [HI]} | fields, salt))
    return made


def complete(front: Any, prompt: Any = "Hi", salt: bytes = b"s", **fields: Any) -> Completion:
    made: Completion = asyncio.run(openai_completions.prepare(front, {"prompt": prompt} | fields, salt))
    return made


def error_of(asked: Coroutine[Any, Any, Any] | Callable[[], Any]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        asked() if callable(asked) else asyncio.run(asked)
    return raised.value


def test_a_chat_with_nothing_but_its_messages(checks: Checks, known: list[Any]) -> None:
    front: Any = Front("qwen3")
    made = chat(front)
    ids = front.text.tokenizer.encode_chat(conversations.Chat([HI]))
    sampling = made.job.sampling
    assert made.job == Job(ids, sampling, (), 0, b"s")
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (500 - len(ids), 0.7, 0.9)
    assert (sampling.logprobs, sampling.grammar) == (None, None)
    assert re.fullmatch(f"chatcmpl-{HEX}", made.id)
    assert (made.created, made.usage.prompt, made.usage.cached, made.usage.completion) == (1234567, len(ids), 0, 0)
    assert (made.front, made.text, made.ready, made.tools) == (front, front.text, front.ready, [])
    assert made.format == FORMATS["qwen3"]
    assert (front.models, checks, known) == ([None], [], [])
    assert chat(front).id != made.id


def test_a_chat_with_settings_of_its_own(checks: Checks, known: list[Any]) -> None:
    front: Any = Front("qwen3")
    fields: dict[str, Any] = {
        "stop": ["a", "b"],
        "priority": 3,
        "cache_salt": "t",
        "model": "m",
        "seed": 5,
        "temperature": 0.25,
    }
    made = chat(front, logprobs=True, top_logprobs=2, max_completion_tokens=9, **fields)
    assert (made.job.stops, made.job.priority, made.job.salt) == (("a", "b"), 3, b"st")
    sampling = made.job.sampling
    assert (sampling.logprobs, sampling.max_tokens, sampling.seed, sampling.temperature) == (2, 9, 5, 0.25)
    assert known == [front.ready]
    assert front.models == ["m"]
    assert chat(front, logprobs=True).job.sampling.logprobs == 0
    assert chat(front, logprobs=True, top_logprobs=0).job.sampling.logprobs == 0
    assert chat(front, logprobs=True, top_logprobs=20).job.sampling.logprobs == 20
    assert chat(front, logprobs=False).job.sampling.logprobs is None
    assert len(known) == 4
    given: list[dict[str, Any]] = [{"max_tokens": 7}, {"max_tokens": 8, "max_completion_tokens": 7}]
    for most in given:
        assert chat(front, **most).job.sampling.max_tokens == 7
    thoughtless = chat(front, chat_template_kwargs={"enable_thinking": False})
    assert front.text.tokenizer.decode(thoughtless.job.ids).endswith("</think>\n\n")


WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens: 0 must be at least 1"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: 0 must be at least 1"),
    ({"max_tokens": 1, "max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens: -1 must be"),
    ({"top_logprobs": 0}, "top_logprobs", "top_logprobs: it needs logprobs: true"),
    ({"top_logprobs": 0, "logprobs": False}, "top_logprobs", "top_logprobs: it needs logprobs: true"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "top_logprobs: 21 must be from 0 to 20"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", "top_logprobs: -1 must be from 0 to 20"),
    ({"model": "wrong"}, "model", "there is no such model"),
    ({"messages": [HI, {"role": "user", "content": "x" * 10**6}]}, "messages[1].content", "messages[1].content: 1"),
    ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages", "the prompt has "),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}, "messages[0].tool_calls", "messages[0]"),
    ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "tool_choice: calls of tools"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice: it needs tools"),
    ({"chat_template_kwargs": {"tools": True}}, "chat_template_kwargs", "chat_template_kwargs: tools is no"),
    ({"reasoning_effort": 5}, "reasoning_effort", "reasoning_effort: Expected"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "text"), WRONG)
def test_what_is_wrong_with_a_chat(checks: Checks, fields: dict[str, Any], param: str | None, text: str) -> None:
    front: Any = Front("qwen3")
    error = error_of(lambda: chat(front, **fields))
    assert (error.param, error.status) == (param, 404 if param == "model" else 400)
    assert str(error).startswith(text)


def test_a_template_that_fails_is_the_messages_fault(checks: Checks) -> None:
    """MiniMax's wants a call before a result."""
    front: Any = Front("minimax_m2")
    result = {"role": "tool", "tool_call_id": "a", "content": ""}
    error = error_of(lambda: chat(front, messages=[HI, result]))
    assert (error.status, error.param) == (400, "messages")
    assert "a tool result follows no call" in str(error)


@pytest.mark.parametrize(
    ("text", "param", "message"),
    [
        ("messages[2].content: is odd", "messages[2].content", "messages[2].content: is odd"),
        ("tools[0]: is odd", "tools[0]", "tools[0]: is odd"),
        ("messages: is odd", "messages", "messages: is odd"),
        ("x messages[0]: is odd", "messages", "x messages[0]: is odd"),
    ],
)
def test_errors_of_chats_name_their_field(text: str, param: str, message: str) -> None:
    error = openai_chat.of_chat(UserError(text))
    assert (error.status, error.param, str(error)) == (400, param, message)


def test_tools_of_a_chat(checks: Checks) -> None:
    """Where the template has none, only a demanded call works, in the format of Qwen3."""
    front: Any = Front("qwen3")
    made = chat(front, tools=[TOOL, OTHER])
    assert made.tools == [TOOL, OTHER]
    assert "<tools>" in front.text.tokenizer.decode(made.job.ids)
    assert chat(front, tools=[TOOL], tool_choice="none").tools == []
    assert checks == []
    forced = chat(front, tools=[TOOL, OTHER], tool_choice="required")
    assert forced.tools == [TOOL, OTHER]
    ((grammar, param, wanted),) = checks
    assert (grammar, param, wanted) == (forced.job.sampling.grammar, "tools", None)
    assert '"{\\"name\\": \\"go\\"' in grammar.text
    front.text.format = None
    error = error_of(lambda: chat(front, tools=[TOOL]))
    assert error.param == "tools"
    assert str(error).startswith("tools: this model's chat template has no tools; only tool_choice required or a named")
    assert chat(front, tools=[TOOL], tool_choice="required").format == FORMATS["qwen3"]
    assert chat(front).format is None
    assert openai_chat._renders_tools(Any_(format=None, template="tools")) is False
    assert openai_chat._renders_tools(Any_(format=FORMATS["qwen3"], template="tools")) is True
    assert openai_chat._renders_tools(Any_(format=FORMATS["qwen3"], template="")) is False


def Any_(format: Any, template: str) -> Any:
    return SimpleNamespace(format=format, tokenizer=SimpleNamespace(template=template))


def test_tools_of_which_one_must_be_called() -> None:
    def forced(choice: Any, tools: Any = (TOOL, OTHER)) -> list[dict[str, Any]]:
        return openai_chat._forced_tools(ChatRequest(tool_choice=choice), [*tools])

    for free in (None, "none", "auto"):
        assert forced(free) == forced(free, []) == []
    assert forced("required") == [TOOL, OTHER]
    assert forced({"type": "function", "function": {"name": "go"}}) == [OTHER]
    for wrong, named in (
        ("must", "'must'"), ({"type": "function", "function": {"name": "run"}}, "'run'"),
        ({"type": "custom", "function": {"name": "go"}}, "{'type': 'custom'"), ({"type": "function"}, "{'type'"),
        ({"type": "function", "function": "go"}, "{'type'"), ({"type": "function", "function": {}}, "{'type'"),
    ):  # fmt: skip
        error = error_of(partial(forced, wrong))
        assert error.param == "tool_choice"
        assert str(error).startswith(f"tool_choice: {named}")
    assert str(error_of(lambda: forced("required", []))) == "tool_choice: it needs tools"


@pytest.mark.parametrize(
    ("template", "name", "has"),
    [
        ("{{ a }}", "a", True), ("{{ ab }}", "a", False), ("{{ ba }}", "a", False), ("{{ x.a }}", "a", False),
        ("{{ 'a' }}", "a", False), ('{{ "a }}', "a", False), ("{{ a' }}", "a", False), ("a", "a", True),
        ("{{ a.b }}", "a", True), ("{{ a b }}", "a b", False), ("{{ aab }} {{ aa }}", "aa", True), ("", "", False),
    ],
)  # fmt: skip
def test_variables_of_a_template(template: str, name: str, has: bool) -> None:
    assert openai_chat.has_variable(template, name) is has


class Tokens:
    """A tokenizer of which it is known whether a prompt opens reasoning; token 0 closes it."""

    def __init__(self, opens: bool, template: str):
        self.opens, self.template = opens, template

    def opens_reasoning(self, ids: list[int]) -> bool:
        return self.opens

    def decode(self, ids: list[int]) -> str:
        return "</think>" if 0 in ids else "x"


def test_grammars_of_whole_answers() -> None:
    """With reasoning before the content, unless the prompt has just closed it."""
    given, ready = Grammar("regex", "a"), Front("qwen3").ready

    def text(format: Any = FORMATS["qwen3"], opens: bool = False, template: str = "<think>") -> Any:
        ids = {"</think>": 9}
        return SimpleNamespace(
            format=format, tokenizer=Tokens(opens, template), mark_ids=lambda given: ids if given is ready else {}
        )

    def whole(text: Any, ids: Any = (1, 2), grammar: Any = given, forced: Any = (), **fields: Any) -> Any:
        return openai_chat._whole_grammar(ChatRequest(**fields), text, ready, grammar, [*forced], [*ids])

    may = '("<think>" thoughts "\\n\\n")? answer'
    must = 'thoughts "\\n\\n" answer'
    rest = "thoughts: thoughts_text <[9]>\nthoughts_text: /(.|\\n)*/\nanswer: /a/\n"
    assert whole(text()) == Grammar("lark", f"start: {may}\n{rest}")
    assert whole(text(opens=True)) == Grammar("lark", f"start: {must}\n{rest}")
    assert whole(text(opens=True, template="")) == Grammar("lark", f"start: {must}\n{rest}")
    assert whole(text(template="")) is given
    assert whole(text(format=None)) is given
    assert whole(text(format=None, opens=True)) is given
    assert whole(text(), [1, 0, *[1] * 7]) is given  # closed within the last eight tokens
    assert whole(text(), [0, *[1] * 8]) == whole(text())
    assert whole(text(), grammar=None) is None
    one = '"<tool_call>" "\\n" (call0) "\\n" "</tool_call>"'
    for fields, several in (
        ({"tool_choice": "required"}, True), ({"tool_choice": "required", "parallel_tool_calls": True}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, False), ({"tool_choice": {}}, False),
    ):  # fmt: skip
        found = whole(text(template=""), forced=[TOOL], grammar=None, **fields).text
        assert found.startswith(f"start: calls\ncalls: {one}" + (' ("\\n"' if several else "\n"))
    assert whole(text(opens=True), forced=[TOOL], grammar=None).text.startswith('start: thoughts "\\n\\n" calls\n')
    assert whole(text(), forced=[TOOL], grammar=None).text.startswith('start: ("<think>" thoughts "\\n\\n")? calls\n')


def test_the_grammar_of_a_chat_is_checked_under_its_field(checks: Checks) -> None:
    front: Any = Front("qwen3")
    made = chat(front, guided_regex="a")
    ((grammar, param, wanted),) = checks
    assert made.job.sampling.grammar is grammar
    assert (param, wanted) == ("guided_regex", Grammar("regex", "a"))
    assert grammar.text.endswith("answer: /a/\n")


def test_a_completion_with_nothing_but_its_prompt(checks: Checks, known: list[Any]) -> None:
    front: Any = Front("qwen3")
    made = complete(front)
    ids = front.text.tokenizer.encode("Hi", False, True)
    (job,) = made.jobs
    assert job == Job(ids, job.sampling, (), 0, b"s")
    assert (job.sampling.max_tokens, job.sampling.logprobs, job.sampling.prompt_logprobs) == (16, None, None)
    assert re.fullmatch(f"cmpl-{HEX}", made.id)
    assert (made.created, made.usage.prompt, made.prompts) == (1234567, len(ids), [""])
    assert (made.front, made.text, made.ready, front.models) == (front, front.text, front.ready, [None])
    assert (checks, known) == ([], [])


def test_a_completion_with_settings_of_its_own(checks: Checks, known: list[Any]) -> None:
    front: Any = Front("qwen3")
    fields: dict[str, Any] = {
        "stop": "a",
        "priority": 3,
        "cache_salt": "t",
        "model": "m",
        "logprobs": 0,
        "guided_regex": "a",
    }
    made = complete(front, ["Hi", [5, 6, 7]], echo=True, max_tokens=3, **fields)
    first, second = made.jobs
    for job in made.jobs:
        assert (job.stops, job.priority, job.salt, job.sampling.max_tokens) == (("a",), 3, b"st", 3)
        assert (job.sampling.logprobs, job.sampling.prompt_logprobs) == (0, 0)
        assert job.sampling.grammar == Grammar("regex", "a")
    assert second.ids == [5, 6, 7]
    assert made.usage.prompt == len(first.ids) + 3
    assert made.prompts == ["Hi", front.text.tokenizer.decode([5, 6, 7])]
    assert known == [front.ready]
    assert checks == [(Grammar("regex", "a"), "guided_regex", None)]
    assert complete(front, echo=True).jobs[0].sampling.prompt_logprobs is None
    assert complete(front, logprobs=4).jobs[0].sampling.prompt_logprobs is None
    assert complete(front, max_tokens=0).jobs[0].sampling.max_tokens == 1
    assert complete(front, [1] * 499).jobs[0].sampling.max_tokens == 1
    last = front.ready.vocabulary - 1
    assert complete(front, [0, last]).jobs[0].ids == [0, last]
    assert complete(front, echo=False).prompts == [""]


@pytest.mark.parametrize("special", [None, True, False])
def test_special_tokens_of_a_completion(monkeypatch: pytest.MonkeyPatch, special: bool | None) -> None:
    front: Any = Front("qwen3")
    asked: list[Any] = []

    def encode(prompt: str, chat: bool, special: bool) -> list[int]:
        asked.append((prompt, chat, special))
        return [1]

    monkeypatch.setattr(front.text.tokenizer, "encode", encode)
    complete(front, add_special_tokens=special)
    assert asked == [("Hi", False, special is not False)]


@pytest.mark.parametrize(
    ("prompt", "fields", "param", "text"),
    [
        ("Hi", {"max_tokens": -1}, "max_tokens", "max_tokens: -1 must be at least 0"),
        ("Hi", {"model": "wrong"}, "model", "there is no such model"),
        ([], {}, "prompt", "prompt: is missing"),
        ([[]], {}, "prompt", "prompt: a prompt must have at least one token"),
        ("", {}, "prompt", "prompt: "),
        ("x" * 10**6, {}, "prompt", "prompt: 1000000 characters are more than 500 tokens can have: shorten it"),
        ([1] * 500, {}, "prompt", "the prompt has 500 tokens"),
        ("\ud800", {}, "prompt", "prompt: "),
    ],
)
def test_what_is_wrong_with_a_completion(prompt: Any, fields: dict[str, Any], param: str, text: str) -> None:
    front: Any = Front("qwen3")
    error = error_of(lambda: complete(front, prompt, **fields))
    assert error.param == param
    assert str(error).startswith(text)


def test_tokens_outside_the_vocabulary_are_named() -> None:
    front: Any = Front("qwen3")
    size = front.ready.vocabulary
    error = error_of(lambda: complete(front, [1, size, size + 1]))
    assert str(error) == f"prompt: token {size} is outside the vocabulary of {size}"


def test_a_text_that_has_too_many_tokens_whatever_they_are() -> None:
    text: Any = SimpleNamespace(tokenizer=SimpleNamespace(longest_token=3))
    ready: Any = SimpleNamespace(longest=4)
    openai_completions.check_length("x" * 12, "p", text, ready)
    error = error_of(lambda: openai_completions.check_length("x" * 13, "p", text, ready))
    assert (error.status, error.param, error.code) == (400, "p", "context_length_exceeded")
    assert str(error) == "p: 13 characters are more than 4 tokens can have: shorten it"


def test_a_grammar_that_fails_is_explained_by_the_part_that_the_request_has() -> None:
    whole, own = Grammar("lark", "whole"), Grammar("regex", "own")
    problems = {("lark", "whole"): "of all", ("regex", "own"): "of its own", ("json", "fine"): ""}
    ready = object()

    def compiler(given: Any) -> Any:
        assert given is ready
        return SimpleNamespace(problem=lambda kind, text: problems[kind, text])

    text: Any = SimpleNamespace(compiler=compiler)

    def check(grammar: Grammar, wanted: Grammar | None = None) -> Any:
        return openai_completions.check_grammar(grammar, "p", text, ready, wanted)  # type: ignore[arg-type]

    check(Grammar("json", "fine"), own)
    for grammar, wanted, said in (
        (whole, None, "of all"), (whole, own, "of its own"), (own, own, "of its own"),
        (whole, Grammar("json", "fine"), "of all"),
    ):  # fmt: skip
        error = error_of(partial(check, grammar, wanted))
        assert (error.status, error.param, error.code, str(error)) == (400, "p", "invalid_grammar", f"p: {said}")


def test_where_the_text_of_each_token_begins() -> None:
    front: Any = Front("qwen3")
    ids = front.text.tokenizer.encode("Hé!", chat=False)
    assert openai_completions.offsets_of(ids, front.text) == [0, 1, 1, 2]
    assert openai_completions.offsets_of([], front.text) == []


RESPONSE = {"input": "Hi"}
MESSAGE = {"messages": [HI], "max_tokens": 9}


def test_a_response_is_a_chat(checks: Checks) -> None:
    front: Any = Front("qwen3")
    made = asyncio.run(responses.prepare(front, RESPONSE | {"temperature": 0.5, "stream": True}, b"s"))
    assert made.stream is True
    assert made.blocks.chat is made.chat
    assert made.request.input == "Hi"
    assert made.chat.job.ids == chat(front).job.ids
    assert (made.chat.job.sampling.temperature, made.chat.job.salt) == (0.5, b"s")
    assert re.fullmatch(HEX, made.key)
    assert (made.sent, made.logprobs, made.blocks.found) == (0, {}, [])
    for data, param in (
        (RESPONSE | {"store": True}, "store"), ({"input": []}, "input"), (RESPONSE | {"max_output_tokens": 0}, None),
        (RESPONSE | {"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"), ([], None),
    ):  # fmt: skip
        error = error_of(responses.prepare(front, data, b""))
        assert (error.status, error.param) == (400, param or ("max_output_tokens" if data else None))
    said = str(error_of(responses.prepare(front, RESPONSE | {"store": True}, b"")))
    assert said == "store: responses are not kept: send store: false, and the whole conversation in input"


def test_a_message_is_a_chat(checks: Checks) -> None:
    front: Any = Front("qwen3")
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 5, "stop_sequences": ["a"], "stream": True}
    made = asyncio.run(anthropic.prepare(front, MESSAGE | fields, b"s"))
    sampling = made.chat.job.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.25, 5)
    assert (made.chat.job.stops, made.chat.job.salt, made.stream) == (("a",), b"s", True)
    assert made.blocks.chat is made.chat
    assert re.fullmatch(f"msg_{HEX}", made.id)
    assert asyncio.run(anthropic.prepare(front, MESSAGE, b"")).stream is False
    for data, param in (
        (MESSAGE | {"stop_sequences": [""]}, "stop_sequences"), (MESSAGE | {"max_tokens": 0}, "max_tokens"),
        (MESSAGE | {"messages": [HI, {"role": "assistant", "content": ""}]}, "messages[1].role"), ([], None),
        (MESSAGE | {"model": "wrong"}, "model"),
    ):  # fmt: skip
        assert error_of(anthropic.prepare(front, data, b"")).param == param


def test_tokens_of_a_message_are_counted_as_they_are_computed(checks: Checks) -> None:
    front: Any = Front("qwen3")
    tool = {"name": "look", "input_schema": {"type": "object"}}
    fields = {"system": "Be brief.", "tools": [tool], "thinking": {"type": "disabled"}}
    data = {"messages": [HI]} | fields
    made = asyncio.run(anthropic.prepare(front, data | {"max_tokens": 1}, b""))
    assert asyncio.run(anthropic.count_tokens(front, data)) == {"input_tokens": len(made.chat.job.ids)}
    assert len(front.models) == 2
    for wrong, param in (
        ({"messages": []}, "messages"), ({"messages": [HI], "model": "wrong"}, "model"), ([], None),
        ({"messages": [HI], "tools": [tool | {"name": "a b"}]}, "tools[0].name"),
        ({"messages": [HI], "max_tokens": "x"}, None), ({"messages": [HI], "mcp_servers": [1]}, "mcp_servers"),
    ):  # fmt: skip
        if param or isinstance(wrong, list):
            assert error_of(anthropic.count_tokens(front, wrong)).param == param
        else:
            assert asyncio.run(anthropic.count_tokens(front, wrong))["input_tokens"] > 0


def test_a_message_that_the_template_refuses_is_named(checks: Checks) -> None:
    front: Any = Front("minimax_m2")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}
    for asked in (anthropic.count_tokens(front, {"messages": [HI, result]}),
                  anthropic.prepare(front, {"messages": [HI, result], "max_tokens": 1}, b"")):  # fmt: skip
        error = error_of(asked)
        assert (error.status, error.param) == (400, "messages")
        assert "a tool result follows no call" in str(error)


def test_text_to_tokens_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    front: Any = Front("qwen3")
    tokenizer = front.text.tokenizer

    def tokens(**data: Any) -> dict[str, Any]:
        return asyncio.run(tokenizing.tokenize(front, data))

    plain = tokens(prompt="Hé", model="m")
    assert plain == {"count": 3, "max_model_len": 500, "tokens": tokenizer.encode("Hé", False)}
    assert front.models == ["m"]
    assert tokens(prompt="H", return_token_strs=True)["token_strs"] == ["H"]
    assert "token_strs" not in tokens(prompt="H", return_token_strs=False)
    asked = tokens(messages=[HI], tools=[TOOL])
    assert "<tools>" in tokenizer.decode(asked["tokens"])
    assert tokens(messages=[HI])["tokens"] == chat(front).job.ids
    given: list[Any] = []

    def encode(*of: Any) -> list[int]:
        given.append(of)
        return [1]

    monkeypatch.setattr(tokenizer, "encode", encode)
    for special in (None, True, False):
        tokens(prompt="Hi", add_special_tokens=special)
    assert given == [("Hi", False, True), ("Hi", False, True), ("Hi", False, False)]
    monkeypatch.undo()
    back = asyncio.run(tokenizing.detokenize(front, {"tokens": plain["tokens"], "model": "n"}))
    assert back == {"prompt": "Hé"}
    assert front.models[-1] == "n"
    last = front.ready.vocabulary - 1
    assert asyncio.run(tokenizing.detokenize(front, {"tokens": [0, last]})).keys() == {"prompt"}


@pytest.mark.parametrize(
    ("data", "param", "text"),
    [
        ({}, "prompt", "prompt: give either prompt or messages"),
        ({"prompt": "a", "messages": [HI]}, "prompt", "prompt: give either prompt or messages"),
        ({"messages": []}, "messages", "messages: is missing or empty"),
        ({"messages": [{"role": "king"}]}, "messages[0].role", "messages[0].role: 'king' is none of"),
        ({"messages": [HI], "tools": [{}]}, "tools[0]", "tools[0]"),
        ({"prompt": "x" * 10**6}, "prompt", "prompt: 1000000 characters are more than 500 tokens can have"),
        ({"prompt": "\ud800"}, "prompt", "prompt: "),
        ({"prompt": "a", "model": "wrong"}, "model", "there is no such model"),
    ],
)
def test_what_cannot_be_tokens(data: dict[str, Any], param: str, text: str) -> None:
    front: Any = Front("qwen3")
    error = error_of(tokenizing.tokenize(front, data))
    assert error.param == param
    assert str(error).startswith(text)


def test_what_is_no_token() -> None:
    front: Any = Front("qwen3")
    size = front.ready.vocabulary
    for wrong in (-1, size):
        error = error_of(tokenizing.detokenize(front, {"tokens": [1, wrong, size + 5]}))
        assert (error.param, str(error)) == ("tokens", f"tokens: {wrong} is outside the vocabulary of {size}")
    assert error_of(tokenizing.detokenize(front, {"tokens": [1], "model": "wrong"})).param == "model"


def test_tokens_that_a_tokenizer_cannot_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    front: Any = Front("qwen3")

    def whole_text(ids: list[int]) -> str:
        raise UserError("the tokenizer failed")

    monkeypatch.setattr(front.text.tokenizer, "whole_text", whole_text)
    error = error_of(tokenizing.detokenize(front, {"tokens": [1]}))
    assert (error.status, error.param, str(error)) == (400, "tokens", "tokens: the tokenizer failed")


def test_echoed_token_ids_are_text() -> None:
    front: Any = Front("qwen3")
    ids = front.text.tokenizer.encode("Hé", chat=False)
    assert complete(front, ids, echo=True).prompts == ["Hé"]
    assert complete(front, ["a", ids], echo=True).prompts == ["a", "Hé"]
