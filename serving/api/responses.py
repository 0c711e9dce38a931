"""POST /v1/responses in the shapes of OpenAI's API, translated to and from chats. Responses are not kept."""

import re
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from umbra.serving.api import fields, openai_chat
from umbra.serving.api.blocks import Change, ContentBlock, ContentBlocks
from umbra.serving.api.errors import ApiError, invalid, renamed
from umbra.serving.api.fields import IGNORED, KnownFields, StreamOptions, converted
from umbra.serving.api.front import Front, Text
from umbra.serving.api.sse import event
from umbra.serving.api.streams import Token
from umbra.text.tool_arguments import read_json_text, repaired, to_json

KNOWN = KnownFields(
    harmless=fields.HARMLESS - {"request_id"} | {"client_metadata"},
    ignored={
        "access_programs": (),
        "context_management": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "truncation": ("disabled",),
    },
    refused={
        "background": (False,),
        "background_options": (),
        "conversation": (),
        "image": (),
        "multi_agent": (),
        "previous_response_id": (),
        "prompt": (),
    },
)
LOGPROBS = "message.output_text.logprobs"
INCLUDED = frozenset({LOGPROBS, "reasoning.encrypted_content"})  # reasoning is always in items, and not encrypted
SERVERS_CALLS = re.compile(
    r"(web_search|file_search|tool_search|image_generation|code_interpreter|mcp|local_shell)_call"
)
LONGEST_TOOL_NAME = 64
INPUT = "input"  # the parameter of a function that stands for a custom tool, whose input is a text
FREE_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text", "refusal": "refusal"}


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None  # of a custom tool's input
    tools: "list[ResponsesTool] | None" = None  # of a namespace


class NamedTool(NamedTuple):
    """The name and kind of a tool in the request, whose function in the chat may be called otherwise."""

    name: str
    custom: bool = False
    namespace: str = ""


class ResponsesRequest(msgspec.Struct, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


@dataclass
class ResponsesAnswer:
    """A request that was read and can run, and its answer so far."""

    request: ResponsesRequest
    chat: openai_chat.ReadChat
    blocks: ContentBlocks
    tools: Mapping[str, NamedTool]  # by the names of their functions
    key: str = field(default_factory=lambda: secrets.token_hex(12))
    logprobs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by number of their block
    sent: int = 0  # events

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    def response(self, status: str, output: list[dict[str, Any]], error: dict[str, str] | None = None) -> Any:
        """The object that a response is; its usage is known when it has ended."""
        request, usage = self.request, self.chat.usage
        sampling, reasoning, text = self.chat.job.request.sampling, request.reasoning or Reasoning(), request.text
        format = msgspec.to_builtins(text.format) if text and text.format else {"type": "text"}
        tools = [_shown(tool) for tool in request.tools or []]
        body = {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self.chat.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self.chat.front.name,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {key: value for key, value in format.items() if value is not None}},
            "tool_choice": request.tool_choice or "auto",
            "tools": tools,
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "metadata": {},
            "usage": None,
        }
        if status not in ("completed", "incomplete"):
            return body
        details = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
        body["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": details,
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self.blocks.reasoning_tokens},
            "total_tokens": usage.prompt + usage.completion,
        }
        return body

    def ended(self, end: Change) -> Any:
        """The whole response."""
        status = _status(end)
        items = [self.item(block, "completed") for block in self.blocks.opened]
        if items:
            items[-1]["status"] = status
        return self.response(status, items)

    def item(self, block: ContentBlock, status: str) -> dict[str, Any]:
        id = self.id(block)
        if block.kind == "call":
            tool = self.tool(block)
            named = {"call_id": block.id, "name": tool.name} | ({"namespace": tool.namespace} if tool.namespace else {})
            if tool.custom:
                return {"id": id, "type": "custom_tool_call", "status": status, **named, "input": _input(block)}
            return {"id": id, "type": "function_call", "status": status, **named, "arguments": block.text}
        content = [] if status == "in_progress" else [self.part(block)]
        if block.kind == "reasoning":
            return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self, block: ContentBlock) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self.logprobs.get(block.number, [])
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def tool(self, block: ContentBlock) -> NamedTool:
        return self.tools.get(block.name, NamedTool(block.name))

    def id(self, block: ContentBlock) -> str:
        return f"{ {'reasoning': 'rs', 'content': 'msg', 'call': 'fc'}[block.kind] }_{self.key}{block.number}"

    def take(self, block: ContentBlock, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        """Keeps the log-probabilities of new tokens. -> those, if they are wanted"""
        if block.kind != "content" or not tokens:
            return []
        new: list[dict[str, Any]] = (self.chat.logprobs(tokens) or {}).get("content", [])
        self.logprobs.setdefault(block.number, []).extend(new)
        return new

    def event(self, name: str, **data: Any) -> bytes:
        data = {"type": name, "sequence_number": self.sent, **data}
        self.sent += 1
        return event(data, name)

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        if not self.sent:
            return self.event("error", code=error.code, message=str(error), param=error.param)
        items = [self.item(block, "incomplete") for block in self.blocks.opened]
        shown = {"code": "server_error", "message": str(error)}
        return self.event("response.failed", response=self.response("failed", items, shown))


async def prepare(front: Front, data: Any, salt: bytes) -> ResponsesAnswer:
    """Reads the request `data`. Raises ApiError if it is wrong."""
    _, text = front.check_serving()
    request = converted(ResponsesRequest, data, KNOWN, front.note)
    chat, names, tools = translated(request, text, front.note)
    try:
        chat_read = await openai_chat.prepare(front, chat, salt)
    except ApiError as error:
        raise renamed(error, names) from None
    return ResponsesAnswer(request, chat_read, ContentBlocks(chat_read), tools)


async def whole(answer: ResponsesAnswer) -> Any:
    """The answer to a request without `stream`."""
    async with aclosing(answer.blocks.changes()) as changes:
        async for change in changes:
            answer.take(change.block, change.tokens)
    return answer.ended(change)


async def events(answer: ResponsesAnswer) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events."""
    async with aclosing(answer.blocks.changes()) as changes:
        async for change in changes:
            if not answer.sent:
                for name in ("created", "in_progress"):
                    yield answer.event(f"response.{name}", response=answer.response("in_progress", []))
            if change.what == "end":
                yield answer.event(f"response.{_status(change)}", response=answer.ended(change))
            else:
                for data in _events(answer, change):
                    yield data


def _events(answer: ResponsesAnswer, change: Change) -> list[bytes]:
    block = change.block
    at: dict[str, Any] = {"item_id": answer.id(block), "output_index": block.number}
    custom = block.kind == "call" and answer.tool(block).custom
    logprobs: dict[str, Any] = {}
    if custom:
        name, what = "custom_tool_call_input", "input"
    elif block.kind == "call":
        name, what = "function_call_arguments", "arguments"
    else:
        at["content_index"] = 0
        name, what = {"reasoning": "reasoning_text", "content": "output_text"}[block.kind], "text"
        if block.kind == "content":
            logprobs = {"logprobs": answer.take(block, change.tokens)}
    parts = block.kind != "call"
    if change.what == "text" and custom:  # its text is known when the call is whole
        return []
    if change.what == "text":
        return [answer.event(f"response.{name}.delta", **at, delta=change.text, **logprobs)]
    if change.what == "open":
        item = answer.item(block, "in_progress")
        events = [answer.event("response.output_item.added", output_index=block.number, item=item)]
        return (
            [*events, answer.event("response.content_part.added", **at, part=answer.part(block))] if parts else events
        )
    if block.kind == "content":
        logprobs = {"logprobs": answer.logprobs.get(block.number, [])}
    text = _input(block) if custom else block.text
    events = [answer.event(f"response.{name}.delta", **at, delta=text)] if custom else []
    events.append(answer.event(f"response.{name}.done", **at, **{what: text}, **logprobs))
    if parts:
        events.append(answer.event("response.content_part.done", **at, part=answer.part(block)))
    item = answer.item(block, _status(change))
    return [*events, answer.event("response.output_item.done", output_index=block.number, item=item)]


def _status(change: Change) -> str:
    return "incomplete" if change.text == "length" else "completed"


def _input(block: ContentBlock) -> str:
    """The text of a call of a custom tool; as much as there is of one that was cut off."""
    arguments = read_json_text(block.text)
    given = (arguments if isinstance(arguments, dict) else repaired(block.text)).get(INPUT, "")
    return given if isinstance(given, str) else to_json(given)


def _shown(tool: ResponsesTool) -> dict[str, Any]:
    """`tool` as a response repeats it."""
    shown = {key: value for key, value in msgspec.to_builtins(tool).items() if value is not None}
    return shown | ({"strict": bool(tool.strict)} if tool.type == "function" else {})


def translated(
    request: ResponsesRequest, text: Text, note: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, str], dict[str, NamedTool]]:
    """The chat that `request` asks for; the request's names of the chat's fields, for errors; and its tools by the
    names of their functions. `note` is told of what is ignored."""
    names = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    for name in request.include or []:
        if name not in INCLUDED:
            note(f"include: {name:.60}: {IGNORED}")
    wants_logprobs = LOGPROBS in (request.include or []) or bool(request.top_logprobs)
    chat: dict[str, Any] = {
        "model": request.model,
        "messages": _messages(request, names, note),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": wants_logprobs or None,
        "top_logprobs": request.top_logprobs if wants_logprobs else None,
        "parallel_tool_calls": request.parallel_tool_calls,
        "chat_template_kwargs": request.chat_template_kwargs,
        "tools": [],
    }
    tools: dict[str, NamedTool] = {}
    for i, tool in enumerate(request.tools or []):
        members = [(tool, "", f"tools[{i}]")]
        if tool.type == "namespace":
            members = [(part, tool.name or "", f"tools[{i}].tools[{j}]") for j, part in enumerate(tool.tools or [])]
        for member, namespace, where in members:
            if member.type not in ("function", "custom"):
                note(f"{where}: tools of type {member.type:.40}: {IGNORED}")
                continue
            names[f"tools[{len(chat['tools'])}].function"] = where
            named = NamedTool(member.name or "", member.type == "custom", namespace)
            tools.setdefault(function_name(named.name, namespace), named)
            chat["tools"].append(_function(member, namespace))
    choice = request.tool_choice
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat["tool_choice"] = choice
    reasoning, config = request.reasoning or Reasoning(), request.text or TextConfig()
    if reasoning.summary in ("concise", "detailed"):
        note("reasoning.summary: reasoning is shown as it is")
    # Clients send "medium" where nobody has asked for anything.
    if reasoning.effort != "medium" or openai_chat.has_variable(text.tokenizer.template, "reasoning_effort"):
        chat["reasoning_effort"] = reasoning.effort
    if config.verbosity in ("low", "high"):
        note(f"text.verbosity: {IGNORED}")
    if config.format:
        chat["response_format"] = {"type": config.format.type}
        if config.format.type == "json_schema":
            chat["response_format"]["json_schema"] = {"name": config.format.name, "schema": config.format.schema}
    return chat, names, tools


def function_name(name: str, namespace: str) -> str:
    """The name of the function that stands for a tool in a chat."""
    separator = "" if not namespace or namespace.endswith("__") else "__"
    return f"{namespace}{separator}{name}"[-LONGEST_TOOL_NAME:] if namespace else name


def _function(tool: ResponsesTool, namespace: str) -> dict[str, Any]:
    """The chat's tool for `tool`."""
    parameters, description = tool.parameters or {}, tool.description
    if tool.type == "custom":
        parameters, format = FREE_TEXT, tool.format or {}
        if definition := format.get("definition"):
            description = f"{description or ''}\n{INPUT} follows this grammar ({format.get('syntax')}):\n{definition}"
    described = {} if description is None else {"description": description}
    function = {"name": function_name(tool.name or "", namespace), **described, "parameters": parameters}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _messages(request: ResponsesRequest, names: dict[str, str], note: Callable[[str], None]) -> list[dict[str, Any]]:
    """The chat's messages. What the model said in one turn, its reasoning, text and calls, is one message. Adds the
    names of the items that messages come from. `note` is told of items that are left out."""
    messages: list[dict[str, Any]] = []

    def add(message: dict[str, Any], where: str) -> dict[str, Any]:
        names[f"messages[{len(messages)}]"] = where
        messages.append(message)
        return message

    if request.instructions is not None:
        add({"role": "system", "content": request.instructions}, "instructions")
    if isinstance(request.input, str):
        add({"role": "user", "content": request.input}, "input")
        return messages
    turn: dict[str, Any] | None = None  # of the model, to which items are added
    for i, item in enumerate(request.input):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "reasoning":
            thoughts = _reasoning(item, where, note)
            if thoughts:
                turn = add({"role": "assistant", "content": "", "reasoning_content": thoughts}, where)
        elif kind == "message" and item.get("role") == "assistant":
            content = _text(item.get("content"), f"{where}.content")
            if turn and not turn["content"] and "tool_calls" not in turn:
                turn["content"] = content
            else:
                turn = add({"role": "assistant", "content": content}, where)
        elif kind in ("function_call", "custom_tool_call"):
            turn = turn or add({"role": "assistant", "content": ""}, where)
            turn.setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "message":
            turn = None
            role = item.get("role")
            if role not in ("user", "system", "developer"):
                raise invalid(f"{where}.role", f"{role!r:.40} is none of user, system, developer, assistant")
            add({"role": role, "content": _text(item.get("content"), f"{where}.content")}, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            turn = None
            id = _string(item, "call_id", where)
            output = _text(item.get("output"), f"{where}.output", note)
            add({"role": "tool", "tool_call_id": id, "content": output}, where)
        elif isinstance(kind, str) and SERVERS_CALLS.fullmatch(kind.removesuffix("_output")):
            note(f"items of type {kind}: {IGNORED}")
        else:
            raise invalid(f"{where}.type", f"items of type {kind!r:.40} are not supported")
    return messages


def _reasoning(item: dict[str, Any], where: str, note: Callable[[str], None]) -> str:
    if item.get("encrypted_content") is not None:
        note("encrypted reasoning is of another server, so it is ignored")
    return _text(item.get("content") or [], f"{where}.content")


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    name = function_name(_string(item, "name", where), str(item.get("namespace") or ""))
    if item["type"] == "custom_tool_call":
        function = {"name": name, "arguments": to_json({INPUT: _string(item, "input", where)})}
    else:
        function = {"name": name, "arguments": _string(item, "arguments", where)}
    return {"id": _string(item, "call_id", where), "type": "function", "function": function}


def _text(content: Any, where: str, note: Callable[[str], None] | None = None) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of parts")
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(TEXTS[kind]) if isinstance(part, Mapping) and isinstance(kind, str) and kind in TEXTS else None
        texts.append(text if isinstance(text, str) else openai_chat.unread(kind, f"{where}[{j}]", note))
    return "\n".join(texts)


def _string(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise invalid(f"{where}.{name}", "must be a string")
    return str(item[name])
