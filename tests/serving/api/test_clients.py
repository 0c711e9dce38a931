"""OpenAI's and Anthropic's own clients read every answer, and their strict types find nothing wrong with them."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.serving.api import test_anthropic as messages
from tests.serving.api.front import Server, run
from tests.serving.api.test_anthropic import CALL, THINKS, told
from tests.serving.api.test_chat import TOOL
from umbra.serving.api.auth import ApiKeys

ASKED: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [TOOL]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": False, **TOOL["function"]}]
MESSAGES_TOOLS: list[Any] = [messages.TOOL]
THOUGHTS = {"qwen3": "", "minimax_m2": "Hm.</think>\n\n"}
SAID = "Hello, naïve 😀"


def openais(scenario: Callable[[Server, openai.AsyncOpenAI], Awaitable[None]], *of: Any, **options: Any) -> None:
    async def whole(server: Server) -> None:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0, timeout=300) as client:
            await scenario(server, client)

    run(whole, *of, **options)


def anthropics(
    scenario: Callable[[Server, anthropic.AsyncAnthropic], Awaitable[None]], *of: Any, **options: Any
) -> None:
    async def whole(server: Server) -> None:
        url = f"http://127.0.0.1:{server.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="key", max_retries=0, timeout=300) as client:
            await scenario(server, client)

    run(whole, *of, **options)


CHATS: list[tuple[str, dict[str, Any]]] = [
    ("minimax_m2", {"n": 2, "logprobs": True, "top_logprobs": 2}),
    ("qwen3", {"max_tokens": 2}),
    ("qwen3", {"tools": TOOLS, "tool_choice": "required"}),
]


@pytest.mark.parametrize(("family", "fields"), CHATS)
def test_chats_have_the_types_of_the_client(fields: dict[str, Any], family: str) -> None:
    async def scenario(server: Server, client: openai.AsyncOpenAI) -> None:
        raw = await client.chat.completions.with_raw_response.create(model="demo_chat", messages=ASKED, **fields)
        answer = ChatCompletion.model_validate(json.loads(raw.text), strict=True)
        body = {"messages": ASKED, "stream": True, "stream_options": {"include_usage": True}, **fields}
        chunks = (await server.ask("/v1/chat/completions", body)).events[:-1]
        parsed = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
        assert parsed[-1].usage == answer.usage
        said = [c.choices[0].delta.content or "" for c in parsed if c.choices and c.choices[0].index == 0]
        assert "".join(said) == (answer.choices[0].message.content or "")
        if "tools" in fields:
            assert answer.choices[0].finish_reason == "tool_calls"
            async with client.chat.completions.stream(model="demo_chat", messages=ASKED, **fields) as stream:
                last = (await stream.get_final_completion()).choices[0].message.tool_calls
            assert last is not None
            assert json.loads(last[0].function.arguments) == {"town": "Bath"}

    openais(scenario, THOUGHTS[family] + (CALL if "tools" in fields else SAID), family=family)


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 2}, {"n": 2}, {"max_tokens": 2, "logprobs": 0}])
def test_completions_have_the_types_of_the_client(fields: dict[str, Any]) -> None:
    async def scenario(server: Server, client: openai.AsyncOpenAI) -> None:
        raw = await client.completions.with_raw_response.create(model="demo_chat", prompt=["A", "B"], **fields)
        body = json.loads(raw.text)
        for choice in body["choices"] if fields.get("echo") else ():
            # The first token has none: null, as OpenAI's server said, although its types have no null.
            assert choice["logprobs"]["token_logprobs"].pop(0) is None
            assert choice["logprobs"]["top_logprobs"].pop(0) is None
        Completion.model_validate(body, strict=True)
        stream = await client.completions.create(model="demo_chat", prompt="A", stream=True, **fields)
        text = "".join([c.choices[0].text async for c in stream if c.choices[0].index == 0])
        assert text == body["choices"][0]["text"]

    openais(scenario)


RESPONSES: list[tuple[str, dict[str, Any]]] = [
    ("minimax_m2", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ("qwen3", {"max_output_tokens": 2}),
    ("qwen3", {"text": {"format": {"type": "json_object"}}}),
    ("qwen3", {"tools": RESPONSE_TOOLS, "tool_choice": {"type": "function", "name": "weather"}}),
]


@pytest.mark.parametrize(("family", "fields"), RESPONSES)
def test_responses_have_the_types_of_the_client(fields: dict[str, Any], family: str) -> None:
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

    async def scenario(server: Server, client: openai.AsyncOpenAI) -> None:
        raw = await client.responses.with_raw_response.create(model="demo_chat", input="Hi", **fields)
        answer = Response.model_validate(json.loads(raw.text), strict=True)
        streamed = told(await server.ask("/v1/responses", {"input": "Hi", "stream": True, **fields}))
        last = [event_type.validate_python(event, strict=True) for event in streamed][-1]
        assert last.type == f"response.{answer.status}"
        assert last.response.usage == answer.usage
        if answer.status == "completed":
            async with client.responses.stream(model="demo_chat", input=ASKED, **fields) as stream:
                final = await stream.get_final_response()
            assert final.output_text == answer.output_text
            assert [item.type for item in final.output] == [item.type for item in answer.output]
        calls = [json.loads(item.arguments) for item in answer.output if item.type == "function_call"]
        assert calls == ([{"town": "Bath"}] if "tools" in fields else [])
        assert (answer.status == "incomplete") == ("max_output_tokens" in fields)

    openais(scenario, THOUGHTS[family] + (CALL if "tools" in fields else SAID), family=family)


MESSAGES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", SAID, {"max_tokens": 2, "metadata": {"user_id": "x"}}),
    ("qwen3", CALL, {"tools": MESSAGES_TOOLS, "tool_choice": {"type": "any"}}),
    ("minimax_m2", THINKS, {"tools": MESSAGES_TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
]


@pytest.mark.parametrize(("family", "answer", "fields"), MESSAGES)
def test_messages_have_the_types_of_the_client(family: str, answer: str, fields: dict[str, Any]) -> None:
    event_type: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

    async def scenario(server: Server, client: anthropic.AsyncAnthropic) -> None:
        asked: dict[str, Any] = {"max_tokens": 200, "messages": ASKED, **fields}
        whole = Message.model_validate((await server.ask("/v1/messages", asked)).json, strict=True)
        for event in told(await server.ask("/v1/messages", asked | {"stream": True})):
            event_type.validate_python(event, strict=True)
        async with client.messages.stream(model="demo_chat", **asked) as stream:
            streamed = await stream.get_final_message()
        shown = [message.model_dump(exclude={"id", "usage", "content"}) for message in (streamed, whole)]
        assert shown[0] == shown[1]
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        assert [without_id(block) for block in streamed.content] == [without_id(block) for block in whole.content]
        counted = await client.messages.count_tokens(
            model="demo_chat", **{k: v for k, v in asked.items() if k in ("messages", "tools", "system", "thinking")}
        )
        assert counted.input_tokens == whole.usage.input_tokens

    anthropics(scenario, answer, family=family)


def without_id(block: Any) -> dict[str, Any]:
    shown: dict[str, Any] = block.model_dump()
    return {key: value for key, value in shown.items() if key != "id" and value is not None}


def test_models_and_parsed_answers() -> None:
    class Weather(BaseModel):
        rain: bool

    async def scenario(server: Server, client: openai.AsyncOpenAI) -> None:
        assert [model async for model in client.models.list()] == [await client.models.retrieve("demo_chat")]
        answer = await client.chat.completions.parse(model="demo_chat", messages=ASKED, response_format=Weather)
        assert answer.choices[0].message.parsed == Weather(rain=True)

    openais(scenario, '{"rain":true}')


def test_errors_are_the_clients_classes() -> None:
    async def chats(server: Server, client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "demo_chat", "messages": ASKED}
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(**asked, temperature=-1)
        assert wrong.value.param == "temperature"
        stream = await client.chat.completions.create(**asked, stream=True)
        await server.engine.die("the disk is full")
        with pytest.raises(openai.APIError, match="the disk is full"):
            async for _ in stream:
                pass

    async def turns(server: Server, client: anthropic.AsyncAnthropic) -> None:
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
            await client.messages.create(model="demo_chat", messages=ASKED, max_tokens=9, stop_sequences=[""])

    openais(chats, "word " * 200, keys=ApiKeys.of([b"key"]), engine={"step_s": 0.01})
    anthropics(turns)
