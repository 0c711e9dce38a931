"""Messages over HTTP: the events that Anthropic's clients wait for, and what is refused by name."""

import json
from typing import Any

import pytest

from tests.serving.api.front import Reply, Server, run
from tests.serving.api.test_chat import TOOL as CHAT_TOOL
from umbra.serving.api.auth import ApiKeys

PATH = "/v1/messages"
TOWN = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
TOOL = {"name": "weather", "input_schema": TOWN}
ASKED: dict[str, Any] = {"max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}
THINKS = (
    "Hm, rain?\n</think>\n\nI look.\n<minimax:tool_call>\n"
    '<invoke name="weather">\n<parameter name="town">Łódź</parameter>\n</invoke>\n</minimax:tool_call>'
)
ANSWERS = {
    "minimax_m2": THINKS,
    "qwen35": "Hm, rain?\n</think>\n\nI look.\n\n<tool_call>\n<function=weather>\n<parameter=town>\nŁódź\n"
    "</parameter>\n</function>\n</tool_call>",
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Bath"}}\n</tool_call>'


def told(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, each of which has its type as its name."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in reply.body.decode().strip().split("\n\n"):
        if not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def refused(reply: Reply) -> tuple[int, str, str]:
    assert reply.json.keys() == {"type", "error"}
    assert reply.json["type"] == "error"
    return reply.status, reply.json["error"]["type"], reply.json["error"]["message"]


@pytest.mark.parametrize("family", ANSWERS)
def test_a_message_and_its_usage(family: str) -> None:
    async def scenario(server: Server) -> None:
        asked = ASKED | {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
        whole = (await server.ask(PATH, asked)).json
        whole["content"][-1].pop("id")
        assert whole["content"] == [
            {"type": "thinking", "thinking": "Hm, rain?", "signature": "unsigned"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "name": "weather", "input": {"town": "Łódź"}},
        ]
        assert whole["usage"] == {
            "input_tokens": len(server.engine.submitted[0].ids) - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": len(server.tokenizer.encode(ANSWERS[family], chat=False)) + 1,
            "output_tokens_details": {"thinking_tokens": len("Hm, rain?")},
        }
        events = told(await server.ask(PATH, asked | {"stream": True}))
        kinds = [(event["type"], event.get("index")) for event in events]
        block = [f"content_block_{name}" for name in ("start", "delta", "stop")]
        order = [("message_start", None), *((kind, n) for n in range(3) for kind in block)]
        assert [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before] == [
            *order,
            ("message_delta", None),
            ("message_stop", None),
        ]
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert events[-2]["usage"] == whole["usage"]

    run(scenario, ANSWERS[family], family=family, engine={"cached_tokens": 3})


def test_why_a_message_ends() -> None:
    async def scenario(server: Server) -> None:
        for fields, reason, stop in (
            ({}, "end_turn", None),
            ({"max_tokens": 3}, "max_tokens", None),
            ({"stop_sequences": ["never", "lo"]}, "stop_sequence", "lo"),
        ):
            body = (await server.ask(PATH, ASKED | fields)).json
            assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)
            delta = told(await server.ask(PATH, ASKED | fields | {"stream": True}))[-2]["delta"]
            assert delta == {"stop_reason": reason, "stop_sequence": stop}

    run(scenario)


def test_a_conversation_is_the_same_prompt_as_that_of_a_chat() -> None:
    async def scenario(server: Server) -> None:
        text = {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}}
        failed: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a", "is_error": True}
        failed |= {"content": [{"type": "text", "text": "no"}]}
        asked = ASKED | {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": "Rain?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": "unsigned"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "a", "name": "weather", "input": {"town": "Bath"}},
                    ],
                },
                {"role": "user", "content": [failed, text]},
            ],
            "tools": [TOOL],
        }
        reply = await server.ask(PATH, asked)
        counted = await server.ask(f"{PATH}/count_tokens", {k: v for k, v in asked.items() if k != "max_tokens"})
        calls = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bath"}'}}]
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "Error: no"},
            {"role": "user", "content": "Well?"},
        ]
        await server.ask("/v1/chat/completions", {"messages": messages, "tools": [CHAT_TOOL]})
        first, second = server.engine.submitted
        assert server.tokenizer.decode(first.ids) == server.tokenizer.decode(second.ids)
        assert counted.json == {"input_tokens": len(first.ids)}
        assert reply.json["usage"]["input_tokens"] == len(first.ids)

    run(scenario, family="minimax_m2")


def test_tools_and_formats_that_are_demanded() -> None:
    async def scenario(server: Server) -> None:
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
            body = (await server.ask(PATH, ASKED | {"tools": [TOOL], "tool_choice": choice})).json
            assert body["content"][0]["input"] == {"town": "Bath"}
            assert server.engine.submitted[-1].sampling.grammar is not None
        format = {"format": {"type": "json_schema", "schema": TOWN}}
        await server.ask(PATH, ASKED | {"output_config": format})
        grammar = server.engine.submitted[-1].sampling.grammar
        assert grammar is not None
        assert json.dumps(TOWN)[:-1] in grammar.text  # after the reasoning
        body = (await server.ask(PATH, ASKED | {"tools": [TOOL], "tool_choice": {"type": "none"}})).json
        assert body["content"] == [{"type": "text", "text": CALL}]
        thinks = {"thinking": {"type": "disabled"}}
        await server.ask(PATH, ASKED | thinks)
        assert server.tokenizer.decode(server.engine.submitted[-1].ids).endswith("</think>\n\n")

    run(scenario, CALL)


def turns(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}, *ASKED["messages"]]}


FOUND = {"type": "tool_result", "tool_use_id": "a"}
CALLED = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
FIRST = "messages[0].content[0]"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
    ({"messages": [*ASKED["messages"], {"role": "assistant", "content": [CALLED]}]}, "messages[1]"),
    ({"messages": [*ASKED["messages"], {"role": "assistant", "content": ""}]}, "messages[1]"),
    (turns({"type": "image"}), f"{FIRST}.type"),
    (turns({"type": "tool_result", "content": ""}), f"{FIRST}.tool_use_id"),
    (turns(FOUND | {"content": [{"type": "text", "text": 5}]}), f"{FIRST}.content[0].text"),
    (turns(FOUND, role="assistant"), f"{FIRST}.type"),
    (turns(CALLED | {"name": 5}, role="assistant"), f"{FIRST}.name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}, TOOL | {"name": "a b"}]}, "tools[1].name"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "bogus"}}}}, "output_config.format"),
]


def test_what_is_refused_has_a_name() -> None:
    async def scenario(server: Server) -> None:
        for fields, param in WRONG:
            status, kind, message = refused(await server.ask(PATH, ASKED | fields))
            assert (status, kind) == (400, "invalid_request_error")
            assert message.startswith(f"{param}: "), (message, param)

    run(scenario)


def test_errors_are_in_the_shape_of_the_path() -> None:
    async def scenario(server: Server) -> None:
        key: dict[str, Any] = {"headers": {"x-api-key": "secret"}}
        assert refused(await server.ask(PATH, ASKED))[:2] == (401, "authentication_error")
        assert (await server.ask(PATH, ASKED, **key)).status == 200
        assert refused(await server.ask(PATH, ASKED | {"model": "x"}, **key))[:2] == (404, "not_found_error")
        assert refused(await server.get(PATH, **key))[:2] == (405, "invalid_request_error")
        assert refused(await server.ask(f"{PATH}/batches", {}, **key))[:2] == (404, "not_found_error")
        connection = await server.open(PATH, ASKED | {"stream": True}, **key)
        await connection.head()
        body = await connection.chunk()
        await server.engine.die("out of memory")
        while data := await connection.chunk():
            body += data
        connection.reply.body = body
        last = told(connection.reply)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        assert "out of memory" in last["error"]["message"]
        assert refused(await server.ask(PATH, ASKED, **key))[:2] == (503, "overloaded_error")

    run(scenario, "Hello!" * 30, keys=ApiKeys.of([b"secret"]), engine={"step_s": 0.01})
