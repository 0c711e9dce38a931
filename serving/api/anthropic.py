"""POST /v1/messages and /v1/messages/count_tokens in the shapes of Anthropic's API, translated to and from chats."""

import json
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from umbra.base.errors import UserError
from umbra.serving.api import openai_chat
from umbra.serving.api.blocks import Change, ContentBlock, ContentBlocks
from umbra.serving.api.errors import ApiError, invalid, renamed
from umbra.serving.api.fields import IGNORED, KnownFields, converted, read
from umbra.serving.api.front import Front
from umbra.serving.api.sse import event
from umbra.text.chat import Chat

PATH = "/v1/messages"
KNOWN = KnownFields(
    harmless=frozenset({"metadata", "cache_control", "user_profile_id", "workspace_id", "betas"}),
    ignored={
        "context_management": (),
        "diagnostics": (),
        "fallbacks": ([],),
        "inference_geo": (),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    },
    refused={"container": (), "output_format": (), "prefill": ()},
)
CLAUDE = "claude-"  # names of models that Claude Code asks for by itself, such as for titles
BILLING = "x-anthropic-billing-header:"  # a block of Claude Code's system prompt that is for Anthropic, and may change
# Blocks of the assistant's messages that tools of Anthropic's server have made, and reasoning that only it reads.
FOREIGN = re.compile(r"server_tool_use|mcp_tool_use|\w+_tool_result|redacted_thinking")
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
UNSIGNED = "unsigned"  # stands where clients expect a signature of reasoning; nothing reads it


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class Turn(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountRequest(msgspec.Struct, kw_only=True):
    """The parts of a prompt."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: openai_chat.Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None


@dataclass
class AnthropicAnswer:
    """A request that was read and can run, and its answer so far."""

    chat: openai_chat.ReadChat
    stream: bool
    blocks: ContentBlocks
    id: str

    def message(self, content: list[dict[str, Any]], end: Change | None) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.chat.front.name}
        return {**head, "content": content, **_reason(end), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        usage = self.chat.usage
        return {
            "input_tokens": usage.prompt - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion,
            "output_tokens_details": {"thinking_tokens": self.blocks.reasoning_tokens},
        }


async def prepare(front: Front, data: Any, salt: bytes) -> AnthropicAnswer:
    """Reads the request `data`. Raises ApiError if it is wrong."""
    front.check_serving()
    request = converted(MessagesRequest, data, KNOWN, front.note)
    chat, names = translated(request, front)
    given = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
    }
    try:
        chat_read = await openai_chat.prepare(front, chat | given, salt)
    except ApiError as error:
        raise renamed(error, names) from None
    return AnthropicAnswer(chat_read, bool(request.stream), ContentBlocks(chat_read), f"msg_{secrets.token_hex(12)}")


async def count_tokens(front: Front, data: Any) -> dict[str, Any]:
    """Answers with the number of tokens of a request's prompt."""
    _, text = front.check_serving()
    chat, names = translated(converted(CountRequest, data, KNOWN, front.note), front)
    try:
        request = read(openai_chat.ChatRequest, chat, front.note)
        front.check_model(request.model)
        messages = openai_chat.messages_of(request.messages, front.note)
        settings = openai_chat.settings_of(request, text, front.note)
        prompt = Chat(messages, openai_chat.tools_of(request), settings, bool(request.continue_final_message))
    except UserError as error:
        raise renamed(openai_chat.of_chat(error), names) from None
    except ApiError as error:
        raise renamed(error, names) from None

    def counted() -> int:
        try:
            return len(text.tokenizer.encode_chat(prompt))
        except UserError as error:
            raise renamed(openai_chat.of_chat(error), names) from None

    return {"input_tokens": await front.work(counted)}


async def whole(answer: AnthropicAnswer) -> dict[str, Any]:
    """The answer to a request without `stream`."""
    async with aclosing(answer.blocks.changes()) as changes:
        async for change in changes:
            end = change
    return answer.message([_block(block) for block in answer.blocks.opened], end)


async def events(answer: AnthropicAnswer) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events."""
    begun = False
    async with aclosing(answer.blocks.changes()) as changes:
        async for change in changes:
            if not begun:
                begun = True
                yield _event("message_start", message=answer.message([], None))
            if change.what == "end":
                yield _event("message_delta", delta=_reason(change), usage=answer.usage())
                yield _event("message_stop")
            else:
                for data in _events(change):
                    yield data


def failure(error: ApiError) -> bytes:
    """The last event of a stream that fails."""
    return event(envelope(error), "error")


def envelope(error: ApiError) -> dict[str, Any]:
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _events(change: Change) -> list[bytes]:
    index, kind = change.block.number, change.block.kind
    if change.what == "open":
        return [_event("content_block_start", index=index, content_block=_block(change.block))]
    if change.what == "text":
        name, field = {
            "reasoning": ("thinking_delta", "thinking"),
            "content": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[kind]
        return [_event("content_block_delta", index=index, delta={"type": name, field: change.text})]
    stop = _event("content_block_stop", index=index)
    if kind != "reasoning":
        return [stop]
    signature = {"type": "signature_delta", "signature": UNSIGNED}
    return [_event("content_block_delta", index=index, delta=signature), stop]


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _block(block: ContentBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": UNSIGNED if block.pieces else ""}
    if block.kind == "content":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(block)}


def _input(block: ContentBlock) -> dict[str, Any]:
    """The arguments of a call; empty for those that the end of the answer has cut off."""
    try:
        arguments = json.loads(block.text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _reason(end: Change | None) -> dict[str, Any]:
    if not end:
        return {"stop_reason": None, "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if end.stop else STOPS[end.text], "stop_sequence": end.stop or None}


def translated(request: CountRequest, front: Front) -> tuple[dict[str, Any], dict[str, str]]:
    """The chat that `request` asks for, and the request's names of the chat's fields, for errors."""
    messages: list[dict[str, Any]] = []
    note = front.note
    names = {"stop": "stop_sequences", "response_format": "output_config.format"}
    names |= {"reasoning_effort": "output_config.effort"}
    if request.system is not None:
        names[f"messages[{len(messages)}]"] = "system"
        messages.append({"role": "system", "content": _texts(_own(request.system), "system")})
    for i, turn in enumerate(request.messages):
        for message in _messages(turn, f"messages[{i}]", note):
            names[f"messages[{len(messages)}]"] = f"messages[{i}]"
            messages.append(message)
    chat: dict[str, Any] = {"model": request.model, "messages": messages, "tools": []}
    if request.model and request.model.startswith(CLAUDE) and request.model not in front.names:
        note(f"model: {request.model:.60} is not here, so {front.name} answers")
        chat["model"] = front.name
    if request.messages and request.messages[-1].role == "assistant":
        if "tool_calls" in messages[-1]:
            raise invalid(f"messages[{len(request.messages) - 1}]", "ends with calls, whose results must follow")
        chat["continue_final_message"] = True
    chat["chat_template_kwargs"] = request.chat_template_kwargs or {}
    for i, tool in enumerate(request.tools or []):
        if tool.type not in (None, "custom"):
            note(f"tool {tool.name:.60} of type {tool.type:.60}: {IGNORED}")
            continue
        own = f"tools[{len(chat['tools'])}].function"
        names |= {own: f"tools[{i}]", f"{own}.parameters": f"tools[{i}].input_schema"}
        chat["tools"].append(_tool(tool, f"tools[{i}]"))
    if choice := request.tool_choice:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = {"auto": "auto", "any": "required", "tool": named, "none": "none"}[choice.type]
        chat["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    if request.thinking:
        if request.thinking.display == "omitted":
            note("thinking.display: reasoning is always shown")
        chat["thinking"] = request.thinking.type != "disabled"
    config = request.output_config or OutputConfig()
    if config.effort != "high":  # which is what requests get that do not say
        chat["reasoning_effort"] = config.effort
    if config.format:
        schema = {"name": "answer", "schema": config.format.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat, names


def _tool(tool: AnthropicTool, where: str) -> dict[str, Any]:
    if tool.input_schema is None:
        raise invalid(f"{where}.input_schema", "is missing")
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _messages(turn: Turn, where: str, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """The chat's messages for one of the request: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant(turn.content, f"{where}.content", note)]
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for j, block in enumerate(turn.content):
        if block.get("type") != "tool_result" or turn.role != "user":
            texts.append(_text(block, f"{where}.content[{j}]"))
            continue
        if texts:
            messages.append({"role": turn.role, "content": "\n".join(texts)})
            texts = []
        messages.append(_result(block, f"{where}.content[{j}]", note))
    if texts or not messages:
        messages.append({"role": turn.role, "content": "\n".join(texts)})
    return messages


def _assistant(content: list[dict[str, Any]], where: str, note: Callable[[str], None]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for j, block in enumerate(content):
        if block.get("type") == "thinking":
            thoughts.append(_string(block, "thinking", f"{where}[{j}]"))
        elif block.get("type") == "tool_use":
            if not isinstance(block.get("input"), Mapping):
                raise invalid(f"{where}[{j}].input", "must be an object")
            function = {"name": _string(block, "name", f"{where}[{j}]"), "arguments": block["input"]}
            calls.append({"id": _string(block, "id", f"{where}[{j}]"), "type": "function", "function": function})
        elif FOREIGN.fullmatch(str(block.get("type"))):
            note(f"blocks of type {block['type']}: {IGNORED}")
        else:
            texts.append(_text(block, f"{where}[{j}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _result(block: dict[str, Any], where: str, note: Callable[[str], None]) -> dict[str, Any]:
    content = block.get("content")
    result = "" if content is None else _texts(content, f"{where}.content", note)
    id = _string(block, "tool_use_id", where)
    return {"role": "tool", "tool_call_id": id, "content": f"Error: {result}" if block.get("is_error") else result}


def _own(system: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """`system` without what is only for Anthropic's server."""
    if isinstance(system, str):
        return system
    return [block for block in system if not str(block.get("text")).startswith(BILLING)]


def _texts(content: Any, where: str, note: Callable[[str], None] | None = None) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(where, "must be a string or a list of blocks")
    return "\n".join(_text(block, f"{where}[{j}]", note) for j, block in enumerate(content))


def _text(block: dict[str, Any], where: str, note: Callable[[str], None] | None = None) -> str:
    source = block.get("source")
    if block.get("type") == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _string(source, "data", f"{where}.source")
    if block.get("type") != "text":
        return openai_chat.unread(block.get("type"), f"{where}.type", note)
    return _string(block, "text", where)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(block.get(name), str):
        raise invalid(f"{where}.{name}", "must be a string")
    return str(block[name])
