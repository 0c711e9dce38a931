"""Anthropic's own client reads every answer, and its strict types find nothing wrong with them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent, TextBlock, ThinkingBlock, ToolUseBlock
from pydantic import TypeAdapter

from serving.api.auth import Keys
from tests.serving.api.front import Server, serving
from tests.serving.api.test_anthropic import ASKED, CALL, THINKS, TOOL, told

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [TOOL]


def run(scenario: Callable[[Server, anthropic.AsyncAnthropic], Awaitable[None]], *arguments: Any, **more: Any) -> None:
    async def whole() -> None:
        async with serving(*arguments, **more) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with anthropic.AsyncAnthropic(base_url=url, api_key="key", max_retries=0, timeout=30) as client:
                await scenario(server, client)

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("family", "answer", "fields"),
    [
        ("qwen3", "Hello, naïve 😀", {}),
        ("qwen3", "Hello", {"max_tokens": 2, "metadata": {"user_id": "x"}}),
        ("qwen3", "Hello", {"stop_sequences": ["l"], "system": [{"type": "text", "text": "Be brief."}]}),
        ("qwen3", CALL, {"tools": TOOLS, "tool_choice": {"type": "any"}}),
        ("minimax_m2", THINKS, {"tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ],
)
def test_messages_have_the_types_of_the_client(family: str, answer: str, fields: dict[str, Any]) -> None:
    event_type: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

    async def scenario(server: Server, client: anthropic.AsyncAnthropic) -> None:
        asked = ASKED | fields
        whole = Message.model_validate((await server.ask("/v1/messages", asked)).json, strict=True)
        for event in told(await server.ask("/v1/messages", asked | {"stream": True})):
            event_type.validate_python(event, strict=True)
        asked = {"max_tokens": 200, "messages": MESSAGES, **fields}
        async with client.messages.stream(model="demo_chat", **asked) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_message()
        shown = [message.model_dump(exclude={"id", "usage", "content"}) for message in (streamed, whole)]
        assert shown[0] == shown[1]
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        assert [without_id(block) for block in streamed.content] == [without_id(block) for block in whole.content]
        counted = await client.messages.count_tokens(
            model="demo_chat", **{k: v for k, v in asked.items() if k in ("messages", "tools", "system", "thinking")}
        )
        assert counted.input_tokens == whole.usage.input_tokens
        if "tools" in fields:
            call = whole.content[-1]
            assert isinstance(call, ToolUseBlock)
            assert call.name == "weather"
            assert set(call.input) == {"town"}

    run(scenario, answer, family=family)


def without_id(block: Any) -> dict[str, Any]:
    shown: dict[str, Any] = block.model_dump()
    return {key: value for key, value in shown.items() if key != "id" and value is not None}


def test_a_conversation_goes_on_from_its_own_blocks() -> None:
    async def scenario(server: Server, client: anthropic.AsyncAnthropic) -> None:
        first = await client.messages.create(model="demo_chat", max_tokens=200, messages=MESSAGES, tools=TOOLS)
        assert [type(block) for block in first.content] == [ThinkingBlock, TextBlock, ToolUseBlock]
        call = first.content[-1]
        assert isinstance(call, ToolUseBlock)
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        history: list[Any] = [
            *MESSAGES,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(model="demo_chat", max_tokens=200, messages=history, tools=TOOLS)
        asked = server.tokenizer.decode(server.engine.submitted[-1].ids)
        for text in ("Hm, rain?", "I look.", '<parameter name="town">', "Łódź", "sunny"):
            assert text in asked

    run(scenario, THINKS, family="minimax_m2")


def test_errors_are_the_clients_classes() -> None:
    async def scenario(server: Server, client: anthropic.AsyncAnthropic) -> None:
        async def create(**fields: Any) -> Any:
            return await client.messages.create(
                **{"model": "demo_chat", "max_tokens": 900, "messages": MESSAGES, **fields}
            )

        with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
            await create(stop_sequences=[""])
        with pytest.raises(anthropic.NotFoundError):
            await create(model="claude")
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(
                model="demo_chat", max_tokens=9, messages=MESSAGES
            )
        stream = await create(stream=True)
        await anext(aiter(stream))
        await server.engine.die("the disk is full")
        with pytest.raises(anthropic.APIStatusError, match="the disk is full"):
            async for _ in stream:
                pass
        with pytest.raises(anthropic.InternalServerError) as busy:
            await create()
        assert json.loads(busy.value.response.text)["error"]["type"] == "overloaded_error"

    run(scenario, "word " * 200, keys=Keys.of([b"key"]), engine={"step_s": 0.01})
