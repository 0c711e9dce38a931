"""The fields of chats, without a server: what messages and tools become, and what is wrong with them by name."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from serving.api import anthropic, body, compiling, fields, openai_completions, responses, server, sse, structured
from serving.api.anthropic import MessagesRequest, translated
from serving.api.errors import ApiError
from serving.api.openai_chat import ChatRequest, messages_of, settings_of, tools_of
from serving.api.openai_completions import CompletionRequest
from serving.ranks import client
from serving.ranks.messages import Grammar, Sampling
from umbra.files import ROOT

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


NOTHING: dict[str, list[Any]] = {  # fields that are not supported: values at which they ask for nothing
    "best_of": [1, 1.0], "suffix": [""], "audio": [], "functions": [[]], "function_call": ["none", "auto"],
    "modalities": [["text"]], "store": [False], "service_tier": ["auto", "default"], "verbosity": ["medium"],
    "use_beam_search": [False], "length_penalty": [1.0, 1], "min_tokens": [0], "include_stop_str_in_output": [False],
    "skip_special_tokens": [True], "spaces_between_special_tokens": [True, False], "truncate_prompt_tokens": [-1],
    "prompt_logprobs": [], "add_generation_prompt": [True], "continue_final_message": [False], "documents": [[]],
    "bad_words": [[]], "allowed_token_ids": [[]], "logits_processors": [[]], "return_tokens_as_token_ids": [False],
    "return_token_ids": [False], "kv_transfer_params": [], "mm_processor_kwargs": [{}], "lora_path": [],
}  # fmt: skip
SOMETHING: dict[str, list[Any]] = {
    "best_of": [2, 0], "store": [True], "use_beam_search": [True], "length_penalty": [2.0, 0.5], "min_tokens": [1],
    "include_stop_str_in_output": [True], "skip_special_tokens": [False], "truncate_prompt_tokens": [1, -2],
    "add_generation_prompt": [False], "continue_final_message": [True], "return_tokens_as_token_ids": [True],
    "return_token_ids": [True], "prompt_logprobs": [1], "spaces_between_special_tokens": ["x"], "suffix": ["x"],
}  # fmt: skip


def refused(kind: Any, data: Any, unsupported: Any = fields.UNSUPPORTED) -> ApiError:
    with pytest.raises(ApiError) as raised:
        fields.converted(kind, data, unsupported)
    assert raised.value.status == 400
    return raised.value


def test_unsupported_fields_may_ask_for_nothing() -> None:
    for name, values in NOTHING.items():
        for value in [None, *values]:
            fields.converted(CompletionRequest, {"prompt": "a", name: value}, fields.UNSUPPORTED)
    for name, values in SOMETHING.items():
        for value in values:
            error = refused(CompletionRequest, {"prompt": "a", name: value})
            assert (error.param, error.code) == (name, "unsupported_parameter")
    assert {name for name in fields.UNSUPPORTED if name not in NOTHING} == {
        "prediction", "web_search_options", "moderation", "chat_template", "guided_whitespace_pattern",
        "structural_tag",
    }  # fmt: skip
    taken = fields.converted(ChatRequest, {"n": 3}, {"n": (1,)})  # a field that the kind has is not refused
    assert taken.n == 3
    wrong: list[Any] = [[], "x", None]
    for data in wrong:
        assert str(refused(ChatRequest, data)) == "the request's body must be a JSON object"
    for field in ("echo", "add_special_tokens"):
        assert fields.converted(ChatRequest, {field: False}, {}).messages == []
        assert refused(ChatRequest, {field: True}).param == field


@pytest.mark.parametrize(
    ("kind", "unsupported", "asked", "nothing", "something"),
    [
        (
            responses.ResponsesRequest, responses.UNSUPPORTED, {"input": "a"},
            {"background": False, "store": False, "context_management": [], "truncation": "disabled"},
            {"background": True, "store": True, "context_management": [1], "truncation": "auto", "max_tool_calls": 1},
        ),
        (
            MessagesRequest, anthropic.UNSUPPORTED, {"messages": [], "max_tokens": 1},
            {"fallbacks": [], "mcp_servers": [], "service_tier": "standard_only", "speed": "standard"},
            {"fallbacks": [1], "mcp_servers": [{}], "service_tier": "priority", "speed": "fast", "prefill": ""},
        ),
    ],
)  # fmt: skip
def test_unsupported_fields_of_other_apis(
    kind: Any, unsupported: Any, asked: dict[str, Any], nothing: dict[str, Any], something: dict[str, Any]
) -> None:
    fields.converted(kind, asked | nothing, unsupported)
    for name, value in something.items():
        assert refused(kind, asked | {name: value}, unsupported).param == name


def test_what_changes_nothing_is_known() -> None:
    """It is counted neither as unknown nor refused; only completions and chats have a request_id."""
    assert {"request_id"} == fields.HARMLESS - responses.HARMLESS
    assert {"user", "metadata", "safety_identifier", "prompt_cache_key"} < responses.HARMLESS
    assert {"metadata", "cache_control"} <= anthropic.HARMLESS


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


def read_refused(**given: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        fields.read(fields.Fields, given)
    return raised.value


def test_why_a_request_s_counts_are_wrong() -> None:
    for given, text, param, code in (
        ({"n": 0}, "n: 0 must be from 1 to 64", "n", None),
        ({"stop": ""}, "stop: at most 16 strings of 1 to 256 characters are allowed", "stop", None),
        ({"stop": ["a", "x" * 257]}, "stop: at most 16 strings of 1 to 256 characters are allowed", "stop", None),
        ({"priority": 2**31 + 1}, "priority: must be from -2147483648 to 2147483648", "priority", None),
        ({"stream_options": {}}, "stream_options: it is only for requests with stream: true", "stream_options", None),
        ({"best_of": 2}, "best_of: this field is not supported", "best_of", "unsupported_parameter"),
        ({"n": "1"}, "n: Expected `int | null`, got `str`".replace("`", ""), "n", None),
    ):
        error = read_refused(**given)
        assert (str(error), error.param, error.code, error.status) == (text, param, code, 400)
    usual = fields.read(fields.Fields, {})
    assert (usual.choices, usual.stops, usual.includes_usage, usual.continuous_usage) == (1, [], False, False)
    several = fields.read(fields.Fields, {"stop": ["a", "b"], "n": 2, "priority": None})
    assert (several.stops, several.choices) == (["a", "b"], 2)


CASE: Any = SimpleNamespace(sampling_config=SimpleNamespace(temperature=0.25, top_k=7, top_p=0.75))
READY: Any = SimpleNamespace(vocabulary=9)


def sampling(grammar: Grammar | None = None, logprobs: int | None = None, **given: Any) -> Sampling:
    return fields.sampling_of(fields.Fields(**given), CASE, READY, 5, grammar, logprobs)


def test_sampling_is_the_request_s_or_else_the_case_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.api.fields.secrets.randbits", lambda bits: 1000 + bits)
    assert sampling() == Sampling(5, temperature=0.25, top_k=7, top_p=0.75, seed=1062)
    given: dict[str, Any] = {
        "temperature": 0.0, "top_k": 3, "top_p": 0.0, "min_p": 0.5, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 1.5, "seed": 3,
    }  # fmt: skip
    grammar = Grammar("regex", "a")
    found = sampling(grammar, 4, stop_token_ids=[0, 8], logit_bias={"8": 2.0}, **given)
    assert found == Sampling(
        5, stop_token_ids=(0, 8), logit_bias={8: 2.0}, grammar=grammar, logprobs=4, **given,
    )  # fmt: skip
    assert sampling(top_k=-1).top_k is sampling(top_k=0).top_k is sampling(top_k=9).top_k is None
    assert sampling(seed=-1).seed == (1 << 63) - 1
    assert sampling(ignore_eos=False).ignore_eos is False
    assert sampling(ignore_eos=True).ignore_eos is True


@pytest.mark.parametrize(
    ("given", "param", "text"),
    [
        ({"stop_token_ids": [9]}, "stop_token_ids", "stop_token_ids: must be token ids below 9"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids: must be token ids below 9"),
        ({"stop_token_ids": [1] * 4097}, "stop_token_ids", "stop_token_ids: 4097 entries are more than 4096"),
        ({"logit_bias": {"9": 1.0}}, "logit_bias", "logit_bias: 9 is no token id below 9"),
        ({"temperature": -1.0}, "temperature", "temperature: -1.0 must be a number of at least 0"),
        ({"top_p": 1.5}, "top_p", None),
        ({"min_p": -0.5}, "min_p", None),
        ({"repetition_penalty": 0.0}, "repetition_penalty", None),
        ({"logit_bias": {"1": 101.0}}, "logit_bias", None),
    ],
)
def test_sampling_out_of_range_is_named(given: dict[str, Any], param: str, text: str | None) -> None:
    with pytest.raises(ApiError) as raised:
        sampling(**given)
    assert (raised.value.status, raised.value.param) == (400, param)
    assert str(raised.value) == (text or str(raised.value))
    assert str(raised.value).startswith(f"{param}: ")
    assert not str(raised.value).startswith(f"{param}: {param}")


def test_lists_of_token_ids_up_to_their_limit() -> None:
    assert sampling(stop_token_ids=[1] * 4096).stop_token_ids == (1,) * 4096
    ready: Any = SimpleNamespace(vocabulary=5000)
    for count, refused in ((4096, False), (4097, True)):
        asked = fields.Fields(logit_bias={str(i): 0.5 for i in range(count)})
        if refused:
            with pytest.raises(ApiError, match="logit_bias: 4097 entries are more than 4096"):
                fields.sampling_of(asked, CASE, ready, 5, None, None)
        else:
            assert len(fields.sampling_of(asked, CASE, ready, 5, None, None).logit_bias) == count


def test_an_answer_with_a_grammar_ends_with_it() -> None:
    with pytest.raises(ApiError) as raised:
        sampling(Grammar("regex", "a"), ignore_eos=True)
    assert (raised.value.status, raised.value.param) == (400, "ignore_eos")


def test_a_prompt_that_leaves_no_room() -> None:
    with pytest.raises(ApiError) as raised:
        fields.length_of_answer(None, "max_tokens", 11, "prompt", 10)
    error = raised.value
    assert (error.status, error.param, error.code) == (400, "prompt", "context_length_exceeded")
    text = "the prompt has 11 tokens, and prompt and answer together can have at most 10: shorten it"
    assert str(error) == text
