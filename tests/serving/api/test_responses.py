"""Responses over HTTP: the events that OpenAI's clients wait for, and what is refused by name."""

import json
from typing import Any

import pytest

from tests.serving.api.front import Server
from tests.serving.api.test_anthropic import CALL, THINKS, run, told
from tests.serving.api.test_chat import TOOL as CHAT_TOOL

PATH = "/v1/responses"
TOOL = {"type": "function", "strict": True, **CHAT_TOOL["function"]}  # type: ignore[dict-item]


def item_events(*deltas: str, part: bool) -> list[str]:
    opened = ["output_item.added", *(["content_part.added"] if part else [])]
    return [*opened, *deltas, *(["content_part.done"] if part else []), "output_item.done"]


@pytest.mark.parametrize("answer", [THINKS])
def test_the_events_of_a_stream_agree_with_the_answer_that_is_not_streamed(answer: str) -> None:
    async def scenario(server: Server) -> None:
        asked = {"input": "Hi", "tools": [TOOL], "instructions": "Be brief."}
        whole = (await server.ask(PATH, asked)).json
        reply = await server.ask(PATH, asked | {"stream": True})
        events = told(reply)
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
        assert [item["type"] for item in ended["output"]] == ["reasoning", "message", "function_call"]
        thoughts, message, call = ended["output"]
        assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm, rain?"}]
        assert message["content"] == [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
        assert (call["name"], json.loads(call["arguments"])) == ("weather", {"town": "Łódź"})
        for number, item in enumerate(ended["output"]):
            own = [event for event in events if event.get("output_index") == number]
            deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
            assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
            assert own[0]["item"]["status"] == "in_progress"
            assert own[-1]["item"] == item
            assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        for response in (whole, ended):
            for item in response["output"]:
                item["id"] = item["call_id"] = ""
            response["id"] = response["created_at"] = ""
        assert whole == ended
        assert (whole["status"], whole["store"]) == ("completed", False)
        usage = whole["usage"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": len("Hm, rain?")}
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] == 3

    run(scenario, answer, family="minimax_m2", engine={"found": 3})


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
        )  # fmt: skip
        calls = [{"id": "a", "type": "function", "function": call}]
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "sunny"},
            {"role": "user", "content": "Well?"},
        ]
        reply = await server.ask("/v1/chat/completions", {"messages": messages, "tools": [CHAT_TOOL]})
        assert reply.status == 200
        first, second = server.engine.submitted
        assert server.tokenizer.decode(first.ids) == server.tokenizer.decode(second.ids)

    run(scenario, family="minimax_m2")


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    async def scenario(server: Server) -> None:
        body = (await server.ask(PATH, {"input": "Hi", "max_output_tokens": 3})).json
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (body["output"][0]["status"], body["output"][0]["content"][0]["text"]) == ("incomplete", "Hel")
        events = told(await server.ask(PATH, {"input": "Hi", "max_output_tokens": 3, "stream": True}))
        assert events[-1]["type"] == "response.incomplete"
        assert events[-2]["item"] == events[-1]["response"]["output"][0]

    run(scenario)


def test_a_call_that_is_cut_off_is_incomplete() -> None:
    """Also where it is told that the call has ended, so that nobody makes it."""

    async def scenario(server: Server) -> None:
        body = {"input": "Rain?", "tools": [TOOL], "stream": True}
        whole = told(await server.ask(PATH, body))
        tokens = len(server.tokenizer.encode(THINKS, chat=False)) - 40
        cut = told(await server.ask(PATH, body | {"max_output_tokens": tokens}))
        for events, status in ((whole, "completed"), (cut, "incomplete")):
            item = events[-1]["response"]["output"][-1]
            assert (item["type"], item["status"]) == ("function_call", status)
            assert events[-2] == events[-2] | {"type": "response.output_item.done", "item": item}

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
        found = (await server.ask(PATH, asked)).json["output"][0]["content"][0]["logprobs"]
        assert [entry["token"] for entry in found][:2] == ["H", "e"]
        assert {len(entry["top_logprobs"]) for entry in found} == {2}
        events = told(await server.ask(PATH, asked | {"stream": True}))
        streamed = [entry for event in events if event["type"].endswith(".delta") for entry in event["logprobs"]]
        assert streamed == found

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "rain"}}, "tool_choice"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"instructions": "x", "input": [{"role": "user", "content": "x" * 10**6}]}, "input[0].content"),
        ({"input": "x" * 1990}, "input"),
    ],
)
def test_what_is_refused_has_a_name(fields: dict[str, Any], param: str) -> None:
    async def scenario(server: Server) -> None:
        reply = await server.ask(PATH, {"input": "Hi"} | fields)
        assert reply.status == 400
        assert reply.error["param"] == param

    run(scenario)


def test_what_asks_for_nothing_is_taken() -> None:
    async def scenario(server: Server) -> None:
        idle = {
            "store": False, "truncation": "disabled", "service_tier": "auto", "background": False, "metadata": {},
            "previous_response_id": None, "include": ["reasoning.encrypted_content"], "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
        }  # fmt: skip
        assert (await server.ask(PATH, {"input": "Hi"} | idle)).status == 200

    run(scenario, CALL)


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
