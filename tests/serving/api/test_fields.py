"""The fields of chats, without a server: what messages and tools become, and what is wrong with them by name."""

from typing import Any

import msgspec
import pytest

from executor.config.load import load_case
from serving.api import anthropic, body, compiling, fields, openai_completions, responses, server, sse, structured
from serving.api.anthropic import MessagesRequest
from serving.api.errors import ApiError
from serving.api.openai_chat import ChatRequest, has_variable, messages_of, tools_of
from serving.api.openai_completions import MOST_PROMPTS, CompletionRequest, nth_choice, prompts_of, salt_of
from serving.ranks import client
from serving.ranks.messages import Ready, Sampling
from umbra.files import ROOT

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def named(name: Any, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_messages_become_texts_under_the_templates_names() -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "a"}, {"text": "b"}, {"type": "refusal", "refusal": "c"}]
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": parts, "name": "n", "strange": 1},
        {"role": "assistant", "content": None, "tool_calls": [], "reasoning": "r"},
        {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "kept"},
        {"role": "tool", "content": None, "tool_call_id": "7"},
    ]
    assert messages_of(given) == [
        {"role": "system", "content": "a\nb\nc", "name": "n"},
        {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": "r"},
        {"role": "assistant", "content": "x", "reasoning_content": "kept"},
        {"role": "tool", "content": "", "tool_call_id": "7"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": ["user"]}, "role"), ({"role": "king", "content": ""}, "role"), ({}, "role"),
        ({"role": "system"}, "content"), ({"role": "user"}, "content"), ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": ["a"]}, "content[0]"),
        ({"role": "user", "content": [{"text": ""}, {"type": "text", "text": 5}]}, "content[1].text"),
        ({"role": "user", "content": [{"type": "refusal", "text": "a"}]}, "content[0].refusal"),
        ({"role": "user", "content": "", "name": 5}, "name"),
        ({"role": "tool", "content": "", "tool_call_id": 5}, "tool_call_id"),
        ({"role": "assistant", "reasoning_content": 5}, "reasoning_content"),
    ],
)  # fmt: skip
def test_a_wrong_message_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        messages_of([{"role": "user", "content": "Hi"}, message])
    assert (refused.value.status, refused.value.param) == (400, f"messages[1].{param}")


def test_tools_are_bounded_and_named_once() -> None:
    many = [named(f"t{i}") for i in range(128)]
    assert tools_of(ChatRequest(tools=many)) == many
    assert tools_of(ChatRequest(tools=many, tool_choice="none")) == []
    assert tools_of(ChatRequest()) == []
    longest = named("a" * 64)
    assert tools_of(ChatRequest(tools=[longest])) == [longest]
    refused: list[tuple[list[Any], str]] = [
        ([*many, named("more")], "tools"),
        ([TOOL, {"type": "custom"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function.name"),
        ([named("a" * 65)], "tools[0].function.name"),
        ([named("")], "tools[0].function.name"),
        ([named("a b")], "tools[0].function.name"),
        ([named(5)], "tools[0].function.name"),
        ([TOOL, named("other"), TOOL], "tools[2].function.name"),
        ([named("a", parameters=["x"])], "tools[0].function.parameters"),
    ]
    for wrong, param in refused:
        with pytest.raises(ApiError) as raised:
            tools_of(ChatRequest(tools=wrong))
        assert raised.value.param == param


@pytest.mark.parametrize(
    ("kind", "unsupported", "asked"),
    [
        (CompletionRequest, fields.UNSUPPORTED, {"prompt": "a"}),
        (responses.ResponsesRequest, responses.UNSUPPORTED, {"input": "a"}),
        (MessagesRequest, anthropic.UNSUPPORTED, {"messages": [], "max_tokens": 1}),
    ],
)
def test_unsupported_fields_may_ask_for_nothing(
    kind: type[msgspec.Struct], unsupported: dict[str, tuple[object, ...]], asked: dict[str, Any]
) -> None:
    for name, idle in unsupported.items():
        for value in [None, *idle]:
            fields.converted(kind, asked | {name: value}, unsupported)
        with pytest.raises(ApiError, match=rf"^{name}: ") as raised:
            fields.converted(kind, asked | {name: ["something"]}, unsupported)
        assert (raised.value.status, raised.value.param, raised.value.code) == (400, name, "unsupported_parameter")
    wrong: list[Any] = [[], "x", None]
    for data in wrong:
        with pytest.raises(ApiError, match="the request's body must be a JSON object"):
            fields.converted(kind, data, unsupported)


def test_limits_are_those_of_the_documentation() -> None:
    """Clients rely on them."""
    text = " ".join((ROOT / "docs" / "serving.md").read_text().split())
    for said in (
        f"or up to {openai_completions.MOST_PROMPTS} of either",
        f"absent: {openai_completions.MAX_TOKENS} for completions",
        f"up to {fields.MOST_CHOICES} answers; the prompt is computed once",
        f"up to {fields.MOST_STOPS} strings of up to {fields.LONGEST_STOP} characters",
        f"a comment after {sse.PING_S:g} s without one",
        f"a client leaves {server.UNREAD >> 10} KiB of its answer unread for {server.UNREAD_S:g} s",
        f"headers take {server.HEADER_S:g} s, a body {body.BODY_S:g} s",
        f"more than {server.MOST_CONNECTIONS:,} connections are open",
        f"Bodies have at most {body.LARGEST_BODY >> 20} MiB and {fields.DEEPEST} levels",
        f"grammars {structured.LARGEST >> 10} KiB, {structured.DEEPEST} levels and {structured.MOST_PROPERTIES} prop",
        f"which ends after {compiling.SECONDS:g} s or {compiling.MEMORY >> 20} MB",
        f"if the ranks answered in the last {client.FRESH_S:g} s",
    ):
        assert said in text, said
    exact = [body.LARGEST_BODY, server.UNREAD, structured.LARGEST, compiling.MEMORY, fields.LARGEST_PRIORITY]
    assert exact == [8 * 1024**2, 256 * 1024, 64 * 1024, 512 * 1024**2, 2**31]


CASE, READY = load_case("demo_chat"), Ready(500, 4, 5000, 16, 64, 1, [0], 100.0)


def sampling(logprobs: int | None = None, **given: Any) -> Sampling:
    return fields.sampling_of(fields.Fields(**given), CASE, READY, 5, None, logprobs)


def test_sampling_is_the_request_s_or_else_the_case_s() -> None:
    usual = sampling()
    assert usual == Sampling(5, temperature=0.7, top_k=None, top_p=0.9, seed=usual.seed)
    assert sampling().seed != usual.seed
    given: dict[str, Any] = {
        "temperature": 0.0, "top_k": 3, "top_p": 0.0, "min_p": 0.5, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 1.5, "seed": 3, "ignore_eos": True,
    }  # fmt: skip
    found = sampling(4, stop_token_ids=[0, 8], logit_bias={"8": 2.0}, **given)
    assert found == Sampling(5, stop_token_ids=(0, 8), logit_bias={8: 2.0}, logprobs=4, **given)
    assert sampling(top_k=-1).top_k is sampling(top_k=0).top_k is sampling(top_k=5000).top_k is None
    assert sampling(seed=-1).seed == (1 << 63) - 1
    assert len(sampling(logit_bias={str(i): 0.5 for i in range(4096)}).logit_bias) == 4096


def test_the_length_of_an_answer_is_what_fits() -> None:
    for given, prompt, most in ((None, 3, 7), (5, 3, 5), (8, 3, 7), (1, 9, 1)):
        assert fields.length_of_answer(given, "max_tokens", prompt, "prompt", 10) == most
    for given, prompt, param, text in (
        (0, 3, "max_tokens", "max_tokens: 0 must be at least 1"),
        (1, 10, "prompt", "the prompt has 10 tokens, and prompt and answer together can have at most 10: shorten it"),
    ):
        with pytest.raises(ApiError, match=text) as raised:
            fields.length_of_answer(given, "max_tokens", prompt, "prompt", 10)
        assert raised.value.param == param


def test_seeds_salts_and_prompts_of_a_completion() -> None:
    one = Sampling(1, seed=(1 << 63) - 2)
    assert [nth_choice(one, n).seed for n in range(3)] == [(1 << 63) - 2, (1 << 63) - 1, 0]
    assert salt_of(b"key", None) == salt_of(b"key", "") == b"key"
    assert salt_of(b"key", "a\ud800") == b"keya?"
    assert salt_of(b"", "x" * 300) == b"x" * 256
    for given in (["a", [1, 2]], [[0]], ["a"] * MOST_PROMPTS):
        assert prompts_of(given) == given
    assert (prompts_of("a"), prompts_of([0, 1])) == (["a"], [[0, 1]])


@pytest.mark.parametrize(
    ("template", "has"),
    [("{{ a }}", True), ("{{ a.b }}", True), ("{{ ab }}", False), ("{{ x.a }}", False), ("{{ 'a' }}", False)],
)
def test_variables_of_a_template(template: str, has: bool) -> None:
    assert has_variable(template, "a") is has
