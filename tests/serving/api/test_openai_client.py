"""OpenAI's own client reads every answer, and its strict types find nothing wrong with them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal, cast

import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from serving.api.auth import Keys
from tests.serving.api.front import Server, serving, until
from tests.serving.api.test_chat import TOOL

ASKED: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [TOOL]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": False, **cast(dict[str, Any], TOOL["function"])}]
THOUGHTS = {"qwen3": "", "minimax_m2": "Hm.</think>\n\n"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Bath"}}\n</tool_call>'


def run(scenario: Callable[[Server, openai.AsyncOpenAI], Awaitable[None]], *arguments: Any, **options: Any) -> None:
    async def whole() -> None:
        async with serving(*arguments, **options) as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0, timeout=30) as client:
                await scenario(server, client)

    asyncio.run(whole())


@pytest.mark.parametrize("family", ["qwen3", "minimax_m2"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"stop": ["l"]},
        {"max_tokens": 2},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
    ],
)  # fmt: skip
def test_answers_have_the_types_of_the_client(fields: dict[str, Any], family: str) -> None:
    async def scenario(server: Server, client: openai.AsyncOpenAI) -> None:
        raw = await client.chat.completions.with_raw_response.create(model="demo_chat", messages=ASKED, **fields)
        answer = ChatCompletion.model_validate(json.loads(raw.text), strict=True)
        assert raw.headers["x-request-id"]
        usage = {"include_usage": True}
        body = {"messages": ASKED, "stream": True, "stream_options": usage, **fields}
        chunks = (await server.ask("/v1/chat/completions", body)).events[:-1]
        parsed = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
        assert parsed[-1].usage == answer.usage
        said = [c.choices[0].delta.content or "" for c in parsed if c.choices and c.choices[0].index == 0]
        assert "".join(said) == (answer.choices[0].message.content or "")
        if "tools" in fields and family == "qwen3":
            assert answer.choices[0].finish_reason == "tool_calls"
            async with client.chat.completions.stream(model="demo_chat", messages=ASKED, **fields) as stream:
                async for _ in stream:
                    pass
                last = (await stream.get_final_completion()).choices[0].message.tool_calls
            assert last is not None
            assert json.loads(last[0].function.arguments) == {"town": "Bath"}

    run(scenario, THOUGHTS[family] + (CALL if "tools" in fields else "Hello, naïve 😀"), family=family)


@pytest.mark.parametrize("fields", [{}, {"echo": True, "logprobs": 2}, {"n": 2}, {"max_tokens": 2, "logprobs": 0}])
def test_completions_have_the_types_of_the_client(fields: dict[str, Any]) -> None:
    async def scenario(server: Server, client: openai.AsyncOpenAI) -> None:
        raw = await client.completions.with_raw_response.create(model="demo_chat", prompt=["A", "B"], **fields)
        body = json.loads(raw.text)
        for choice in body["choices"]:
            assert choice["finish_reason"] in ("stop", "length")
            if choice["logprobs"] and fields.get("echo"):
                # The first token has none: null, as OpenAI's server said, although its types have no null.
                assert choice["logprobs"]["token_logprobs"].pop(0) is None
                assert choice["logprobs"]["top_logprobs"].pop(0) is None
        Completion.model_validate(body, strict=True)
        stream = await client.completions.create(model="demo_chat", prompt="A", stream=True, **fields)
        text = "".join([c.choices[0].text async for c in stream if c.choices[0].index == 0])
        assert text == body["choices"][0]["text"]

    run(scenario)


@pytest.mark.parametrize("family", ["qwen3", "minimax_m2"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"max_output_tokens": 2},
        {"tools": RESPONSE_TOOLS, "instructions": "Be brief."},
        {"tools": RESPONSE_TOOLS, "tool_choice": {"type": "function", "name": "weather"}},
        {"text": {"format": {"type": "json_object"}}},
    ],
)
def test_responses_have_the_types_of_the_client(fields: dict[str, Any], family: str) -> None:
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    called = "tools" in fields and family == "qwen3"

    async def scenario(server: Server, client: openai.AsyncOpenAI) -> None:
        raw = await client.responses.with_raw_response.create(model="demo_chat", input="Hi", **fields)
        answer = Response.model_validate(json.loads(raw.text), strict=True)
        body = {"input": "Hi", "stream": True, **fields}
        events = [
            event_type.validate_python(json.loads(block.split("\ndata: ")[1]), strict=True)
            for block in (await server.ask("/v1/responses", body)).body.decode().split("\n\n")[:-1]
        ]
        assert events[-1].type == f"response.{answer.status}"
        assert events[-1].response.usage == answer.usage
        assert events[-1].response.output_text == answer.output_text
        async with client.responses.stream(model="demo_chat", input=ASKED, **fields) as stream:
            async for _ in stream:
                pass
            if answer.status == "completed":
                final = await stream.get_final_response()
                assert final.output_text == answer.output_text
                assert [item.type for item in final.output] == [item.type for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == ([{"town": "Bath"}] if called else [])
        assert (answer.status == "incomplete") == ("max_output_tokens" in fields)

    run(scenario, THOUGHTS[family] + (CALL if "tools" in fields else "Hello, naïve 😀"), family=family)


def test_a_conversation_of_responses_goes_on_from_their_own_items() -> None:
    """As agents do: what was answered is sent back, and the result of the tool behind it."""

    async def scenario(server: Server, client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="demo_chat", input="Rain?", tools=RESPONSE_TOOLS)
        calls = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
        items = [item.model_dump(exclude_none=True) for item in first.output]
        history: list[Any] = [{"role": "user", "content": "Rain?"}, *items, *results]
        assert (await client.responses.create(model="demo_chat", input=history, tools=RESPONSE_TOOLS)).output
        asked = server.tokenizer.decode(server.engine.submitted[-1].ids)
        assert '"arguments": {"town": "Bath"}' in asked or '<parameter name="town">Bath' in asked
        assert "rain" in asked

    run(scenario, CALL)


def test_models_and_parsed_answers() -> None:
    class Weather(BaseModel):
        rain: bool
        wind: Literal["low", "high"]

    async def scenario(server: Server, client: openai.AsyncOpenAI) -> None:
        models = [model async for model in client.models.list()]
        assert models == [await client.models.retrieve("demo_chat")]
        assert isinstance(models[0], Model)
        answer = await client.chat.completions.parse(model="demo_chat", messages=ASKED, response_format=Weather)
        assert answer.choices[0].message.parsed == Weather(rain=True, wind="low")
        grammar = server.engine.submitted[-1].sampling.grammar
        assert grammar is not None
        assert '"wind"' in grammar.text

    run(scenario, '{"rain":true,"wind":"low"}')


def test_errors_are_the_clients_classes() -> None:
    async def scenario(server: Server, client: openai.AsyncOpenAI) -> None:
        async def create(**fields: Any) -> Any:
            return await client.chat.completions.create(**{"model": "demo_chat", "messages": ASKED, **fields})

        with pytest.raises(openai.BadRequestError) as wrong:
            await create(temperature=-1)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="other")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        stream = await create(stream=True)
        held = asyncio.create_task(create())
        await until(lambda: server.front.limits.open == 2 and len(server.engine.running) == 1)
        with pytest.raises(openai.RateLimitError) as busy:
            await create()
        assert busy.value.response.headers["retry-after"]
        await server.engine.die("the disk is full")
        with pytest.raises(openai.APIError, match="the disk is full"):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="the disk is full"):
            await held
        with pytest.raises(openai.InternalServerError):
            await create()

    run(scenario, "word " * 200, keys=Keys.of([b"key"]), engine={"batch_size": 1, "step_s": 0.01}, max_queue=1)
