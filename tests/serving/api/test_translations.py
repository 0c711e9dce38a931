"""What requests of other APIs are as chats, field by field, and the errors of each field, without a server."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from serving.api import anthropic, fields, responses
from serving.api.errors import ApiError
from serving.api.logprobs import name_of
from serving.api.openai_completions import MOST_PROMPTS, nth_choice, prompts_of, salt_of
from serving.api.responses import ResponsesRequest

Call = Callable[..., Any]


def told(does: Call, *given: Any, **more: Any) -> tuple[str | None, str]:
    """The field that an error names, and its text."""
    with pytest.raises(ApiError) as caught:
        does(*given, **more)
    assert caught.value.status == 400
    return caught.value.param, str(caught.value)


def asked(input: Any, **more: Any) -> ResponsesRequest:
    return msgspec.convert({"input": input, **more}, ResponsesRequest)


TEXT: Any = SimpleNamespace(tokenizer=SimpleNamespace(template="{{ messages }}"))


def test_items_of_a_turn_are_one_message() -> None:
    items = [
        {"role": "user", "content": "one"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "go", "arguments": "[]"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call", "call_id": "c3", "name": "look", "arguments": ""},
        {"role": "assistant", "content": "behind the call"},
        {"role": "assistant", "content": "and again"},
        {"type": "reasoning", "content": None},
        {"role": "user", "content": "three"},
    ]
    names: dict[str, str] = {}
    function = {"name": "look", "arguments": "{}"}
    assert responses._messages(asked(items, instructions="Be brief."), names) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "developer", "content": "two"},
        {
            "role": "assistant", "content": "a\nb", "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": {"name": "go", "arguments": "[]"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {
            "role": "assistant", "content": "",
            "tool_calls": [{"id": "c3", "type": "function", "function": {"name": "look", "arguments": ""}}],
        },
        {"role": "assistant", "content": "behind the call"},
        {"role": "assistant", "content": "and again"},
        {"role": "user", "content": "three"},
    ]  # fmt: skip
    places = ["instructions", *(f"input[{i}]" for i in (0, 1, 2, 6, 7, 8, 9, 11))]
    assert names == {f"messages[{n}]": place for n, place in enumerate(places)}
    names = {}
    assert responses._messages(asked("Hi"), names) == [{"role": "user", "content": "Hi"}]
    assert names == {"messages[0]": "input"}


WRONG_ITEMS: list[tuple[dict[str, Any], str, str]] = [
    ({"role": "tool", "content": "x"}, "role", "'tool' is none of user, system, developer, assistant"),
    ({"role": "user", "content": 3}, "content", "must be a string or a list of parts"),
    ({"role": "user", "content": [{"type": "input_image"}]}, "content[0]", "parts of type 'input_image' are not"),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}, "content[1]", "parts of type"),
    ({"role": "user", "content": ["a"]}, "content[0]", "parts of type None are not supported"),
    ({"role": "user", "content": [{"type": []}]}, "content[0]", "parts of type [] are not supported"),
    ({"type": "reasoning", "encrypted_content": "x"}, "encrypted_content", "is of another server"),
    ({"type": "function_call", "name": "a", "arguments": "b"}, "call_id", "must be a string"),
    ({"type": "function_call", "call_id": "a", "arguments": "b"}, "name", "must be a string"),
    ({"type": "function_call", "call_id": "a", "name": "b", "arguments": {}}, "arguments", "must be a string"),
    ({"type": "function_call_output", "output": "b"}, "call_id", "must be a string"),
    ({"type": "function_call_output", "call_id": "a", "output": None}, "output", "must be a string or a list"),
    ({"type": "web_search_call"}, "type", "items of type 'web_search_call' are not supported"),
]


@pytest.mark.parametrize(("item", "field", "error"), WRONG_ITEMS)
def test_wrong_items_are_named(item: dict[str, Any], field: str, error: str) -> None:
    param, text = told(responses._messages, asked(["skip", item][1:]), {})
    assert param == f"input[0].{field}"
    assert text.startswith(f"{param}: {error}")


def test_fields_of_a_response_are_a_chats() -> None:
    chat, names = responses.translated(
        asked(
            "Hi", model="m", max_output_tokens=5, temperature=0.5, top_p=0.25, top_logprobs=2,
            parallel_tool_calls=False,
            tools=[{"type": "function", "name": "a", "description": "d", "parameters": {"x": 1}},
                   {"type": "function", "name": "b"}],
            tool_choice={"type": "function", "name": "a"}, reasoning={"effort": "high", "summary": "auto"},
            text={"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": {"y": 2}}},
        ),
        TEXT,
    )  # fmt: skip
    assert chat == {
        "model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 5, "temperature": 0.5,
        "top_p": 0.25, "logprobs": True, "top_logprobs": 2, "parallel_tool_calls": False,
        "tools": [
            {"type": "function", "function": {"name": "a", "description": "d", "parameters": {"x": 1}}},
            {"type": "function", "function": {"name": "b", "parameters": {}}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "a"}}, "reasoning_effort": "high", "verbosity": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"y": 2}}},
    }  # fmt: skip
    assert names["tools[1].function"] == "tools[1]"
    plain, _ = responses.translated(asked("Hi", text={"format": {"type": "text"}}, tool_choice="auto"), TEXT)
    assert (plain["logprobs"], plain["top_logprobs"], plain["tools"]) == (None, None, [])
    assert (plain["response_format"], plain["tool_choice"]) == ({"type": "text"}, "auto")
    assert plain["reasoning_effort"] is None
    wanted, _ = responses.translated(asked("Hi", include=["message.output_text.logprobs"]), TEXT)
    assert wanted["logprobs"] is True
    with_effort: Any = SimpleNamespace(tokenizer=SimpleNamespace(template="{{ reasoning_effort }}"))
    medium = asked("Hi", reasoning={"effort": "medium"})
    assert "reasoning_effort" not in responses.translated(medium, TEXT)[0]
    assert responses.translated(medium, with_effort)[0]["reasoning_effort"] == "medium"
    assert told(responses.translated, asked("Hi", include=["x"]), TEXT)[0] == "include"
    assert told(responses.translated, asked("Hi", tools=[{"type": "web"}]), TEXT)[0] == "tools[0].type"
    for summary in ("concise", "detailed"):
        request = asked("Hi", reasoning={"summary": summary})
        assert told(responses.translated, request, TEXT)[0] == "reasoning.summary"


def turn(role: str, content: Any) -> anthropic.Turn:
    return msgspec.convert({"role": role, "content": content}, anthropic.Turn)


def test_blocks_of_messages() -> None:
    blocks = [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"},
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sun"}]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c3"},
        {"type": "text", "text": "c"},
    ]  # fmt: skip
    assert anthropic._messages(turn("user", blocks), "m") == [
        {"role": "user", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "c"},
    ]
    assert anthropic._messages(turn("user", []), "m") == [{"role": "user", "content": ""}]
    assert anthropic._messages(turn("user", blocks[3:4]), "m") == [
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no"}
    ]
    assert anthropic._messages(turn("assistant", "a"), "m") == [{"role": "assistant", "content": "a"}]
    said = [
        {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, {"type": "thinking", "thinking": "so"},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"x": 1}}, {"type": "text", "text": "b"},
    ]  # fmt: skip
    function = {"name": "look", "arguments": {"x": 1}}
    assert anthropic._messages(turn("assistant", said), "m") == [
        {
            "role": "assistant", "content": "a\nb", "reasoning_content": "hm\nso",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
    ]  # fmt: skip
    assert anthropic._messages(turn("assistant", said[1:2]), "m") == [{"role": "assistant", "content": "a"}]


WRONG_BLOCKS: list[tuple[str, Any, str, str]] = [
    ("user", {"type": "image"}, ".type", "blocks of type 'image' are not supported here"),
    ("user", {"type": "text"}, ".text", "must be a string"),
    ("user", {"type": "tool_result", "content": "a"}, ".tool_use_id", "must be a string"),
    ("user", {"type": "tool_result", "tool_use_id": "a", "content": 3}, ".content", "must be a string or a list"),
    ("user", {"type": "tool_result", "tool_use_id": "a", "content": ["b"]}, ".content", "must be a string or a list"),
    ("user", {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "x"}]}, ".content[0].type", "blocks of"),
    ("assistant", {"type": "tool_result", "tool_use_id": "a"}, ".type", "blocks of type 'tool_result' are not"),
    ("assistant", {"type": "thinking"}, ".thinking", "must be a string"),
    ("assistant", {"type": "tool_use", "id": "a", "name": "b", "input": "{}"}, ".input", "must be an object"),
    ("assistant", {"type": "tool_use", "id": "a", "input": {}}, ".name", "must be a string"),
    ("assistant", {"type": "tool_use", "name": "a", "input": {}}, ".id", "must be a string"),
]


@pytest.mark.parametrize(("role", "block", "field", "error"), WRONG_BLOCKS)
def test_wrong_blocks_are_named(role: str, block: Any, field: str, error: str) -> None:
    param, text = told(anthropic._messages, turn(role, [{"type": "text", "text": "a"}, block]), "messages[3]")
    assert param == f"messages[3].content[1]{field}"
    assert text.startswith(f"{param}: {error}")


def test_prompts_of_a_completion() -> None:
    assert prompts_of("a") == ["a"]
    assert prompts_of(["a", [1, 2]]) == ["a", [1, 2]]
    assert prompts_of([0, 1]) == [[0, 1]]
    assert prompts_of([[0]]) == [[0]]
    assert len(prompts_of(["a"] * MOST_PROMPTS)) == MOST_PROMPTS
    assert told(prompts_of, ["a"] * (MOST_PROMPTS + 1)) == ("prompt", "prompt: 65 prompts are more than 64")
    for nothing in (None, []):
        assert told(prompts_of, nothing)[1].startswith("prompt: is missing")
    for wrong in ([1, -1], ["a", 1], [[1, True]], [[-1]], [{}], [True], [[1.0]]):
        assert told(prompts_of, wrong)[1].endswith("is neither a text nor a list of token ids")


def test_seeds_and_salts_of_a_completion() -> None:
    Sampling = msgspec.defstruct("Sampling", [("seed", int)])
    one = Sampling(seed=(1 << 63) - 2)
    assert nth_choice(one, 0) is one
    assert [nth_choice(one, n).seed for n in (1, 2, 3)] == [(1 << 63) - 1, 0, 1]
    assert salt_of(b"key", None) == salt_of(b"key", "") == b"key"
    assert salt_of(b"key", "a\ud800") == b"keya?"
    assert salt_of(b"", "x" * 300) == b"x" * 256


def test_counts_of_a_request_up_to_their_limits() -> None:
    def request(**given: Any) -> Any:
        return fields.read(fields.Fields, given)

    assert request(n=fields.MOST_CHOICES).choices == fields.MOST_CHOICES
    for n in (0, fields.MOST_CHOICES + 1):
        assert told(request, n=n) == ("n", f"n: {n} must be from 1 to {fields.MOST_CHOICES}")
    long = "x" * fields.LONGEST_STOP
    assert request(stop=[long] * fields.MOST_STOPS).stops == [long] * fields.MOST_STOPS
    assert request(stop="x").stops == ["x"]
    assert request().stops == []
    for stop in ([long] * (fields.MOST_STOPS + 1), [long + "x"], [""], ""):
        assert told(request, stop=stop)[0] == "stop"
    for priority in (-fields.LARGEST_PRIORITY, fields.LARGEST_PRIORITY):
        assert request(priority=priority).priority == priority
        wrong = priority + (1 if priority > 0 else -1)
        assert told(request, priority=wrong)[0] == "priority"
    assert told(request, stream_options={"include_usage": True})[0] == "stream_options"
    streamed = request(stream=True, stream_options={"include_usage": True})
    assert (streamed.includes_usage, streamed.continuous_usage) == (True, False)
    every = {"continuous_usage_stats": True}
    assert not request(stream=True, stream_options=every).continuous_usage
    assert request(stream=True, stream_options=every | {"include_usage": True}).continuous_usage
    assert not request(stream=True).includes_usage
    assert fields.unknown(fields.Fields, {"n": 1, "x": 2, "y": 3}, {"y"}) == ["x"]


def test_the_depth_of_a_body() -> None:
    def nested(levels: int) -> Any:
        found: Any = 1
        for level in range(levels):
            found = [found] if level % 2 else {"a": found}
        return found

    fields.check_depth(nested(fields.DEEPEST - 1))
    assert "levels deep" in told(fields.check_depth, nested(fields.DEEPEST))[1]
    fields.check_depth(3)


def test_token_ids_and_lengths_up_to_their_limits() -> None:
    assert [fields._top_k(k, 9) for k in (-1, 0, 1, 8, 9, 10)] == [None, None, 1, 8, None, None]
    assert fields._biases({"0": 1.5, "8": -1.0}, 9) == {0: 1.5, 8: -1.0}
    assert fields._biases({"00000000008": 1.0}, 9) == {8: 1.0}
    for name in ("9", "-1", "", "x", "1.0", "²", "000000000008"):
        assert told(fields._biases, {name: 1.0}, 9)[0] == "logit_bias"
    assert fields.length_of_answer(None, "a", 3, "p", 10) == 7
    assert fields.length_of_answer(1, "a", 9, "p", 10) == 1
    assert fields.length_of_answer(5, "a", 3, "p", 10) == 5
    assert fields.length_of_answer(8, "a", 3, "p", 10) == 7
    assert told(fields.length_of_answer, 0, "a", 3, "p", 10) == ("a", "a: 0 must be at least 1")
    param, text = told(fields.length_of_answer, None, "a", 10, "p", 10)
    assert (param, "has 10 tokens" in text) == ("p", True)


def asked_of_messages(**more: Any) -> anthropic.MessagesRequest:
    given = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **more}
    return msgspec.convert(given, anthropic.MessagesRequest)


def test_tools_of_messages_are_a_chats() -> None:
    schema = {"type": "object"}
    tools = [
        {"name": "a", "input_schema": schema}, {"name": "b", "type": "custom", "input_schema": {}, "description": "d"},
        {"name": "c", "description": "", "input_schema": schema},
    ]  # fmt: skip
    chat, names = anthropic.translated(asked_of_messages(tools=tools, system="s", model="m"), TEXT)
    assert chat == {
        "model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}],
        "tools": [
            {"type": "function", "function": {"name": "a", "parameters": schema}},
            {"type": "function", "function": {"name": "b", "description": "d", "parameters": {}}},
            {"type": "function", "function": {"name": "c", "description": "", "parameters": schema}},
        ],
        "reasoning_effort": None,
    }  # fmt: skip
    assert names == {
        "stop": "stop_sequences", "response_format": "output_config.format", "reasoning_effort": "output_config.effort",
        "chat_template_kwargs": "thinking", "messages[0]": "system", "messages[1]": "messages[0]",
        **{f"tools[{i}].function": f"tools[{i}]" for i in range(3)},
        **{f"tools[{i}].function.parameters": f"tools[{i}].input_schema" for i in range(3)},
    }  # fmt: skip
    for wrong, param, text in (
        ({"name": "b", "type": "web_search", "input_schema": {}}, "tools[1].type", "web_search is not supported: only"),
        ({"name": "b"}, "tools[1].input_schema", "is missing"),
    ):
        found = told(anthropic.translated, asked_of_messages(tools=[tools[0], wrong]), TEXT)
        assert found[0] == param
        assert found[1].startswith(f"{param}: {text}")


def test_formats_and_turns_of_messages() -> None:
    config = {"effort": "low", "format": {"type": "json_schema", "schema": {"x": 1}}}
    chat, _ = anthropic.translated(asked_of_messages(output_config=config), TEXT)
    assert chat["response_format"] == {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"x": 1}}}
    assert chat["reasoning_effort"] == "low"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    param, text = told(anthropic.translated, asked_of_messages(messages=turns), TEXT)
    assert (param, text) == ("messages[1].role", "messages[1].role: an answer that is begun cannot be continued")
    assert anthropic.translated(asked_of_messages(messages=[]), TEXT)[0]["messages"] == []
    results = [{"type": "tool_result", "tool_use_id": "a"}, {"type": "tool_result", "tool_use_id": "b"}]
    several = [{"role": "user", "content": results}, *turns[1:], {"role": "system", "content": "c"}]
    chat, names = anthropic.translated(asked_of_messages(messages=several), TEXT)
    assert [message["role"] for message in chat["messages"]] == ["tool", "tool", "assistant", "system"]
    places = [names[f"messages[{n}]"] for n in range(4)]
    assert places == ["messages[0]", "messages[0]", "messages[1]", "messages[2]"]
    thinking = asked_of_messages(thinking={"type": "enabled", "display": "omitted"})
    error = told(anthropic.translated, thinking, TEXT)
    assert error == ("thinking.display", "thinking.display: reasoning is always shown")
    shown = asked_of_messages(thinking={"type": "adaptive", "display": "summarized"})
    assert told(anthropic.translated, shown, TEXT) == ("thinking.type", "thinking.type: this model never reasons")
    system_result = [{"type": "tool_result", "tool_use_id": "a"}]
    assert told(anthropic._messages, turn("system", system_result), "m")[0] == "m.content[0].type"


def test_tokens_without_a_text_are_written_as_bytes() -> None:
    assert [name_of(data) for data in (b"a", "é".encode(), b"", b"\xc3", b"a\xff\x00")] == [
        "a", "é", "", "bytes:\\xc3", "bytes:\\x61\\xff\\x00",
    ]  # fmt: skip
