"""The fields of chats, without a server: what messages and tools become, and what is wrong with them by name."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from executor.serving.anthropic import MessagesRequest, translated
from executor.serving.errors import ApiError
from executor.serving.openai_chat import ChatRequest, messages_of, settings_of, tools_of

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def text_of(template: str) -> Any:
    return SimpleNamespace(tokenizer=SimpleNamespace(template=template))


def named(name: Any, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_messages_become_texts_under_the_templates_names() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, {"type": "refusal", "refusal": "c"}]
    given = [
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


@pytest.mark.parametrize("count", [1, 4096])
def test_messages_are_bounded(count: int) -> None:
    message = {"role": "user", "content": ""}
    assert len(messages_of([message] * count)) == count
    for wrong in (0, 4097):
        with pytest.raises(ApiError) as refused:
            messages_of([message] * wrong)
        assert refused.value.param == "messages"


def test_tools_are_bounded_and_named_once() -> None:
    many = [named(f"t{i}") for i in range(128)]
    assert tools_of(ChatRequest(tools=many)) == many
    assert tools_of(ChatRequest(tools=many, tool_choice="none")) == []
    assert tools_of(ChatRequest()) == []
    longest = named("a" * 64)
    assert tools_of(ChatRequest(tools=[longest])) == [longest]
    for wrong, param in (
        ([*many, named("more")], "tools"),
        ([TOOL, {"type": "custom"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function.name"),
        ([named("a" * 65)], "tools[0].function.name"),
        ([named("")], "tools[0].function.name"),
        ([named("a b")], "tools[0].function.name"),
        ([named(5)], "tools[0].function.name"),
        ([TOOL, named("other"), TOOL], "tools[2].function.name"),
        ([named("a", parameters=["x"])], "tools[0].function.parameters"),
    ):
        with pytest.raises(ApiError) as refused:
            tools_of(ChatRequest(tools=wrong))
        assert refused.value.param == param


def test_reasoning_effort_becomes_the_templates_variable() -> None:
    def settings(template: str, **fields: Any) -> dict[str, Any]:
        return settings_of(ChatRequest(**fields), text_of(template))

    effort, thinking = "{{ reasoning_effort }}", "{% if enable_thinking %}"
    assert settings(effort) == {}
    assert settings(effort, reasoning_effort="low") == {"reasoning_effort": "low"}
    assert settings(effort + thinking, reasoning_effort="none") == {"reasoning_effort": "none"}
    assert settings(thinking, reasoning_effort="low") == {"enable_thinking": True}
    assert settings(thinking, reasoning_effort="none") == {"enable_thinking": False}
    given = {"enable_thinking": False}
    assert settings(thinking, reasoning_effort="high", chat_template_kwargs=given) == given
    for template in ("", "message.enable_thinking", "'reasoning_effort'"):
        with pytest.raises(ApiError) as refused:
            settings(template, reasoning_effort="low")
        assert (refused.value.param, refused.value.code) == ("reasoning_effort", "unsupported_parameter")
    for name in ("nothing", "messages", "a b"):
        with pytest.raises(ApiError) as refused:
            settings("{{ messages }} {{ a b }}", chat_template_kwargs={name: 1})
        assert refused.value.param == "chat_template_kwargs"


def chat_of(template: str = "", **fields: Any) -> dict[str, Any]:
    asked = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]} | fields
    return translated(msgspec.convert(asked, MessagesRequest), text_of(template))[0]


def test_anthropics_choices_of_tools_become_those_of_chats() -> None:
    for given, wanted in (
        ({"type": "auto"}, ("auto", None)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", None)),
        ({"type": "none"}, ("none", None)),
        ({"type": "tool", "name": "w"}, ({"type": "function", "function": {"name": "w"}}, None)),
    ):
        chat = chat_of(tool_choice=given)
        assert (chat["tool_choice"], chat["parallel_tool_calls"]) == wanted
    usual = chat_of(output_config={"effort": "high"})
    assert not usual.keys() & {"tool_choice", "parallel_tool_calls", "reasoning_effort", "response_format"}
    assert chat_of(output_config={"effort": "low"})["reasoning_effort"] == "low"


def test_anthropics_blocks_become_messages_of_their_own() -> None:
    result = {"type": "tool_result", "tool_use_id": "1"}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t"}, {"type": "text", "text": "c"},
            {"type": "tool_use", "id": "1", "name": "w", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "d"}, result | {"content": "e"}, result | {"content": [], "is_error": True},
            result, {"type": "text", "text": "f"},
        ]},
        {"role": "user", "content": []},
    ]  # fmt: skip
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": {}}}
    assert chat_of(messages=turns, system=[{"type": "text", "text": "s"}])["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "t", "tool_calls": [call]},
        {"role": "user", "content": "d"},
        {"role": "tool", "tool_call_id": "1", "content": "e"},
        {"role": "tool", "tool_call_id": "1", "content": "Error: "},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "user", "content": "f"},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("role", "block", "param"),
    [
        ("assistant", {"type": "tool_use", "id": "1", "name": "w", "input": []}, "input"),
        ("assistant", {"type": "tool_use", "id": "1", "name": 5, "input": {}}, "name"),
        ("assistant", {"type": "tool_use", "id": 1, "name": "w", "input": {}}, "id"),
        ("assistant", {"type": "thinking", "thinking": None}, "thinking"),
        ("user", {"type": "tool_result", "content": ""}, "tool_use_id"),
        ("user", {"type": "tool_result", "tool_use_id": "1", "content": 5}, "content"),
        ("user", {"type": "tool_result", "tool_use_id": "1", "content": ["a"]}, "content"),
        ("user", {"type": "text", "text": 5}, "text"),
        ("user", {"type": "image"}, "type"),
    ],
)
def test_a_wrong_block_is_named(role: str, block: dict[str, Any], param: str) -> None:
    turns = [{"role": role, "content": [block]}, {"role": "user", "content": "Hi"}]
    with pytest.raises(ApiError) as refused:
        chat_of(messages=turns)
    assert (refused.value.status, refused.value.param) == (400, f"messages[0].content[0].{param}")


def test_a_model_thinks_as_its_template_does() -> None:
    def variables(kind: str, template: str) -> Any:
        return chat_of(template, thinking={"type": kind, "budget_tokens": 1024})["chat_template_kwargs"]

    assert variables("enabled", "{{ enable_thinking }}") == {"enable_thinking": True}
    assert variables("disabled", "{{ enable_thinking }}") == {"enable_thinking": False}
    assert variables("enabled", "<think>") == {}
    assert variables("disabled", "") == {}
    for kind, template in (("enabled", ""), ("disabled", "<think>")):
        with pytest.raises(ApiError) as refused:
            variables(kind, template)
        assert refused.value.param == "thinking.type"
