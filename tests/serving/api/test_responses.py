"""Responses over HTTP: the events that OpenAI's clients wait for, and what is refused by name."""

import json
from typing import Any

import pytest

from tests.serving.api.front import Server, run
from tests.serving.api.test_anthropic import ANSWERS, THINKS, told
from tests.serving.api.test_chat import TOOL as CHAT_TOOL

PATH = "/v1/responses"
TOOL = {"type": "function", "strict": True, **CHAT_TOOL["function"]}


def item_events(*deltas: str, part: bool) -> list[str]:
    opened = ["output_item.added", *(["content_part.added"] if part else [])]
    return [*opened, *deltas, *(["content_part.done"] if part else []), "output_item.done"]


@pytest.mark.parametrize("family", ANSWERS)
def test_a_response_and_its_usage(family: str) -> None:
    async def scenario(server: Server) -> None:
        asked = {"input": "Hi", "tools": [TOOL], "instructions": "Be brief."}
        whole = (await server.ask(PATH, asked)).json
        events = told(await server.ask(PATH, asked | {"stream": True}))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [name.removeprefix("response.") for name in unrepeated(events)] == [
            "created",
            "in_progress",
            *item_events("reasoning_text.delta", "reasoning_text.done", part=True),
            *item_events("output_text.delta", "output_text.done", part=True),
            *item_events("function_call_arguments.delta", "function_call_arguments.done", part=False),
            "completed",
        ]
        ended = events[-1]["response"]
        thoughts, message, call = ended["output"]
        assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm, rain?"}]
        assert message["content"] == [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
        assert (call["name"], json.loads(call["arguments"])) == ("weather", {"town": "Łódź"})
        for number, item in enumerate(ended["output"]):
            own = [event for event in events if event.get("output_index") == number]
            deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
            assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
            assert (own[0]["item"]["status"], own[-1]["item"]) == ("in_progress", item)
        for response in (whole, ended):
            for item in response["output"]:
                item["id"] = item["call_id"] = ""
            response["id"] = response["created_at"] = ""
        assert whole == ended
        assert (whole["status"], whole["store"], whole["instructions"]) == ("completed", False, "Be brief.")
        tokens = len(server.tokenizer.encode(ANSWERS[family], chat=False)) + 1
        prompt = len(server.engine.submitted[0].ids)
        assert whole["usage"] == {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": len("Hm, rain?")},
            "total_tokens": prompt + tokens,
        }

    run(scenario, ANSWERS[family], family=family, engine={"cached_tokens": 3})


def unrepeated(events: list[dict[str, Any]]) -> list[str]:
    names = [event["type"] for event in events]
    return [name for name, before in zip(names, ["", *names], strict=False) if name != before]


def test_a_conversation_is_the_same_prompt_as_that_of_a_chat() -> None:
    call = {"name": "weather", "arguments": '{"town": "Bath"}'}

    async def scenario(server: Server) -> None:
        thoughts = [{"type": "reasoning_text", "text": "Hm"}]
        await server.ask(
            PATH,
            {
                "instructions": "Be brief.",
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
                    {"type": "reasoning", "id": "rs_1", "summary": [], "content": thoughts},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                    {"type": "function_call", "call_id": "a", **call},
                    {"type": "function_call_output", "call_id": "a", "output": "sunny"},
                    {"role": "user", "content": "Well?"},
                ],
                "tools": [TOOL],
            },
        )
        calls = [{"id": "a", "type": "function", "function": call}]
        strict = {**CHAT_TOOL, "function": {**CHAT_TOOL["function"], "strict": True}}
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "sunny"},
            {"role": "user", "content": "Well?"},
        ]
        reply = await server.ask("/v1/chat/completions", {"messages": messages, "tools": [strict]})
        assert reply.status == 200
        first, second = server.engine.submitted
        assert server.tokenizer.decode(first.ids) == server.tokenizer.decode(second.ids)

    run(scenario, family="minimax_m2")


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    """Also where it is told that a call has ended, so that nobody makes it."""

    async def scenario(server: Server) -> None:
        asked = {"input": "Rain?", "tools": [TOOL], "stream": True}
        tokens = len(server.tokenizer.encode(THINKS, chat=False)) - 40
        for most, kind in ((3, "reasoning"), (tokens, "function_call")):
            *_, done, last = told(await server.ask(PATH, asked | {"max_output_tokens": most}))
            response = last["response"]
            assert (last["type"], response["status"]) == ("response.incomplete", "incomplete")
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            assert (response["output"][-1]["type"], response["output"][-1]["status"]) == (kind, "incomplete")
            assert (done["type"], done["item"]) == ("response.output_item.done", response["output"][-1])

    run(scenario, THINKS, family="minimax_m2")


def test_formats_and_log_probabilities() -> None:
    schema = {"type": "object", "properties": {"town": {"type": "string"}}}

    async def scenario(server: Server) -> None:
        format = {"type": "json_schema", "name": "town", "schema": schema, "strict": True}
        body = (await server.ask(PATH, {"input": "Hi", "text": {"format": format}})).json
        assert body["text"]["format"] == format
        grammar = server.engine.submitted[-1].sampling.grammar
        assert grammar is not None
        assert json.dumps(schema)[:-1] in grammar.text  # after the reasoning
        asked = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        logprobs = (await server.ask(PATH, asked)).json["output"][0]["content"][0]["logprobs"]
        assert [entry["token"] for entry in logprobs][:2] == ["H", "e"]
        assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}
        events = told(await server.ask(PATH, asked | {"stream": True}))
        streamed = [entry for event in events if event["type"].endswith(".delta") for entry in event["logprobs"]]
        assert streamed == logprobs

    run(scenario)


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


MADE = {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"tools": [{"type": "web_search"}, {"type": "custom", "name": "a b"}]}, "tools[1].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "rain"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"input": []}, "input"),
    (item(type="item_reference", id="msg_1"), "input[0].type"),
    (item(role="user", content=[{"type": "input_image"}]), "input[0].content[0]"),
    (item(**MADE | {"arguments": {}}), "input[0].arguments"),
    (item(type="function_call_output", call_id="a", output=None), "input[0].output"),
    ({"input": "x" * 1990}, "input"),
]


def test_what_is_refused_has_a_name() -> None:
    async def scenario(server: Server) -> None:
        for fields, param in WRONG:
            reply = await server.ask(PATH, {"input": "Hi"} | fields)
            assert (reply.status, reply.error["param"]) == (400, param)

    run(scenario)


def test_a_stream_whose_ranks_end_is_a_failed_response() -> None:
    async def scenario(server: Server) -> None:
        connection = await server.open(PATH, {"input": "Hi", "stream": True})
        await connection.head()
        body = await connection.chunk()
        await server.engine.die("out of memory")
        while data := await connection.chunk():
            body += data
        connection.reply.body = body
        last = told(connection.reply)[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert "out of memory" in last["response"]["error"]["message"]

    run(scenario, "Hello!" * 100, engine={"step_s": 0.01})
