"""POST /v1/chat/completions. Translations of other APIs make a ChatRequest, `prepare` it, read `ReadChat.deltas`."""

import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from umbra.base.errors import UserError
from umbra.executor.engine.schedule.request import MOST_LOGPROBS, Grammar
from umbra.serving.api.errors import ApiError, invalid
from umbra.serving.api.fields import Fields, length_of_answer, read, sampling_of, truncated
from umbra.serving.api.front import Front, ServedJob, Text
from umbra.serving.api.jobs import check_calls, check_grammar, check_length, job_of, nth_job
from umbra.serving.api.logprobs import TokenTexts, chat_logprobs
from umbra.serving.api.request_log import Usage
from umbra.serving.api.sse import DONE, event
from umbra.serving.api.streams import Stream, StreamPiece, Token, Turns, together
from umbra.serving.api.structured import (
    GrammarMarks,
    after_reasoning,
    calls_grammar,
    grammar_field,
    in_final_message,
    wanted_grammar,
)
from umbra.serving.ranks.messages import Ready
from umbra.text import chat as conversations
from umbra.text.formats import JSON_CALLS, OutputMarks
from umbra.text.tool_prompt import renders_tools

MOST_MESSAGES, MOST_TOOLS = 4096, 128
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Variables of templates that the server sets itself, or that are no variables but arguments of the template's runner.
RESERVED = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs", "conversation"}
    | {"return_assistant_tokens_mask"}
)
TemplateKwargs: TypeAlias = dict[str, str | int | float | bool | list[str] | None]
REASONING = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
UNREAD = "this model's chat template has no such switch, so it is ignored"
NO_TOOLS = (
    "this model's chat template has no tools: start the server with one that has (--chat-template FILE), or demand a "
    "call by tool_choice required or a named one"
)


class Thinking(msgspec.Struct, kw_only=True):
    """The switch of reasoning, as other APIs have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class ChatRequest(Fields, kw_only=True):
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: bool | Thinking | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None


class ChatDelta(msgspec.Struct, frozen=True):
    """The new part of one of the answers. A tool call is one `call`, whose text is the tool's name, then `arguments`,
    pieces of one JSON object, then `end`. The last one of each answer is `finish`: stop, length or tool_calls."""

    index: int  # of the answer
    kind: Literal["reasoning", "content", "call", "arguments", "end", "finish"]
    text: str = ""
    call: int = -1  # number of the tool call in its answer
    call_id: str = ""
    tokens: Sequence[Token] = ()  # generated since the delta before, if their log-probabilities are wanted
    stop: str = ""  # of a finish: the stop string that ended the answer


@dataclass
class ReadChat:
    """A request that was read and can run."""

    front: Front
    request: ChatRequest
    text: Text
    ready: Ready
    job: ServedJob
    chat: conversations.Chat
    format: OutputMarks | None
    usage: Usage
    id: str
    created: int

    async def deltas(self) -> AsyncGenerator[ChatDelta, None]:
        """All answers as they come. Raises ApiError if the request must wait too long, or if it fails."""
        choices, streams = self.request.choices, []
        with self.front.admit(len(self.job.request.ids), choices) as ticket:
            turns = Turns(ticket.rows)
            for choice in range(choices):
                own = nth_job(self.job, choice)
                stream = Stream(self.front, self.text, self.ready, own, self.usage)
                streams.append(self._deltas(choice, turns.pieces(stream, 0, choice, ticket)))
            async with aclosing(together(streams)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _deltas(self, index: int, pieces: AsyncGenerator[StreamPiece, None]) -> AsyncGenerator[ChatDelta, None]:
        ids, chat = self.job.request.ids, self.chat
        parser = self.text.tokenizer.reader(self.format, ids, chat.tools, self.text.splits, chat.begun)
        call, call_id = -1, ""
        tokens: list[Token] = []
        async with aclosing(pieces):
            async for piece in pieces:
                tokens += piece.tokens
                parts = [part for text in piece.texts for part in parser.push(text)]
                if piece.finish:
                    parts += parser.finish(cut=piece.finish == "length")
                for kind, text, id in parts:
                    if kind == "call":
                        call, call_id = call + 1, id or f"call_{secrets.token_hex(12)}"
                    in_call = kind in ("call", "arguments", "end")
                    if in_call and call > 0 and self.request.parallel_tool_calls is False:
                        continue
                    yield ChatDelta(index, kind, text, call if in_call else -1, call_id if in_call else "", tokens)
                    tokens = []
                if piece.finish:
                    reason = "tool_calls" if call >= 0 and piece.finish == "stop" else piece.finish
                    yield ChatDelta(index, "finish", reason, tokens=tokens, stop=piece.stop)
                    return

    def body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.front.name}
        return {**head, "choices": choices, **more}

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, TokenTexts(self.text)) if self.request.logprobs else None


async def prepare(front: Front, data: Any, salt: bytes) -> ReadChat:
    """Reads the request `data`. Raises ApiError if it is wrong."""
    ready, text = front.check_serving()
    return await front.work(lambda: _read(front, data, salt, ready, text))


def _read(front: Front, data: Any, salt: bytes, ready: Ready, text: Text) -> ReadChat:
    """All that takes time for large requests; in a thread."""
    request = read(ChatRequest, data, front.note)
    front.check_model(request.model)
    messages = messages_of(request.messages, front.note)
    tools = tools_of(request)
    settings = settings_of(request, text, front.note)
    grammar = wanted_grammar(request, front.note)
    forced = _forced_tools(request, tools)
    if forced and grammar:
        raise invalid("tool_choice", "calls of tools are demanded, and a format of the content as well: leave one out")
    continued = _continued(request)
    if continued and (forced or grammar):
        field = "tool_choice" if forced else grammar_field(request)
        raise invalid(field, "the answer that is begun does not follow it: leave out continue_final_message")
    format = text.format
    if tools and not forced and not takes_tools(text):
        raise invalid("tools", NO_TOOLS)
    if forced and not format:
        format = JSON_CALLS
    most_given, name = request.max_completion_tokens, "max_completion_tokens"
    if most_given is None and request.max_tokens is not None:
        most_given, name = request.max_tokens, "max_tokens"
    top = request.top_logprobs
    if top is not None and not request.logprobs:
        raise invalid("top_logprobs", "it needs logprobs: true")
    if top is not None and not 0 <= top <= MOST_LOGPROBS:
        raise invalid("top_logprobs", f"{top} must be from 0 to {MOST_LOGPROBS}")
    for i, message in enumerate(messages):
        check_length(message["content"], f"messages[{i}].content", text, ready)
    try:
        chat = conversations.Chat(messages, tools, settings, continued)
        ids, branches = text.tokenizer.chat_prompt(chat)
    except UserError as error:
        raise of_chat(error) from None
    strict = [] if grammar or not any(tool["function"].get("strict") is True for tool in tools) else tools
    wanted, grammar = grammar, _whole_grammar(front, request, text, grammar, forced, strict, ids)
    if grammar and wanted:
        check_grammar(grammar, grammar_field(request), text, wanted)
    elif grammar:
        check_calls(grammar, forced or strict, text)
    ids, dropped = truncated(request, ids), len(ids)
    dropped -= len(ids)
    most = length_of_answer(most_given, name, len(ids), "messages", ready.longest)
    sampling = sampling_of(request, front.case, ready, most, grammar, (top or 0) if request.logprobs else None)
    job = job_of(request, ids, sampling, salt, tuple(tokens - dropped for tokens in branches if tokens > dropped))
    id_and_time = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
    return ReadChat(front, request, text, ready, job, chat, format, Usage(len(ids)), *id_and_time)


async def whole(chat: ReadChat) -> dict[str, Any]:
    """The answer to a request without `stream`."""
    choices = [_Whole() for _ in range(chat.request.choices)]
    async with aclosing(chat.deltas()) as deltas:
        async for delta in deltas:
            choices[delta.index].add(delta)
    body = [
        {
            "index": index,
            "message": choice.message(),
            "logprobs": chat.logprobs(choice.tokens),
            "finish_reason": choice.finish,
        }
        for index, choice in enumerate(choices)
    ]
    return chat.body("chat.completion", body, usage=chat.usage.body())


class _Whole:
    """Collects one answer."""

    def __init__(self) -> None:
        self.said: dict[str, list[str]] = {"reasoning": [], "content": []}
        self.calls: list[tuple[str, str, list[str]]] = []
        self.tokens: list[Token] = []
        self.finish = ""

    def add(self, delta: ChatDelta) -> None:
        self.tokens += delta.tokens
        if delta.kind == "finish":
            self.finish = delta.text
        elif delta.kind == "call":
            self.calls.append((delta.call_id, delta.text, []))
        elif delta.kind == "arguments":
            self.calls[-1][2].append(delta.text)
        elif delta.kind != "end":
            self.said[delta.kind].append(delta.text)

    def message(self) -> dict[str, Any]:
        content = "".join(self.said["content"])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.said["reasoning"]:
            message["reasoning_content"] = "".join(self.said["reasoning"])
        if self.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": "".join(pieces)}}
                for id, name, pieces in self.calls
            ]
        return message


async def events(chat: ReadChat) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events."""
    usage: dict[str, Any] = {"usage": None} if chat.request.includes_usage else {}
    continuous = chat.request.continuous_usage
    kind, begun = "chat.completion.chunk", set()
    async with aclosing(chat.deltas()) as deltas:
        async for delta in deltas:
            usage = {"usage": chat.usage.body()} if continuous else usage
            if delta.index not in begun:
                begun.add(delta.index)
                opening = {"role": "assistant", "content": "", "refusal": None}
                yield event(chat.body(kind, [_chunk(delta.index, opening)], **usage))
            finish = delta.text if delta.kind == "finish" else None
            if delta.kind == "end" and not delta.tokens:
                continue
            if finish and delta.tokens:  # the last chunk says nothing but why the answer has ended
                yield event(
                    chat.body(kind, [_chunk(delta.index, {"content": ""}, chat.logprobs(delta.tokens))], **usage)
                )
            logprobs = None if finish else chat.logprobs(delta.tokens)
            yield event(chat.body(kind, [_chunk(delta.index, _delta(delta), logprobs, finish)], **usage))
    if usage:
        yield event(chat.body(kind, [], usage=chat.usage.body()))
    yield DONE


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _delta(delta: ChatDelta) -> dict[str, Any]:
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "call":
        function = {"name": delta.text, "arguments": ""}
        return {"tool_calls": [{"index": delta.call, "id": delta.call_id, "type": "function", "function": function}]}
    if delta.kind == "arguments":
        return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.text}}]}
    return {}


def _continued(request: ChatRequest) -> bool:
    """Says whether the model goes on with the last message."""
    continued = bool(request.continue_final_message)
    if continued and request.add_generation_prompt:
        raise invalid("add_generation_prompt", "it begins another message: leave out continue_final_message")
    if request.add_generation_prompt is False and not continued:
        raise invalid("add_generation_prompt", "without it, continue_final_message: true is needed")
    return continued


def messages_of(given: list[dict[str, Any]], note: Callable[[str], None]) -> list[dict[str, Any]]:
    """The messages as templates read them, with texts as contents. `note` is told of parts of results that are no text,
    in whose place something says so. Raises ApiError for others."""
    if not given:
        raise invalid("messages", "is missing or empty")
    if len(given) > MOST_MESSAGES:
        raise invalid("messages", f"{len(given)} messages are more than {MOST_MESSAGES}")
    return [_message(message, f"messages[{i}]", note) for i, message in enumerate(given)]


def _message(message: dict[str, Any], where: str, note: Callable[[str], None]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role", f"{role!r:.40} is none of {', '.join(ROLES)}")
    content = _text(message.get("content"), f"{where}.content", note if role == "tool" else None)
    if ROLES[role] in ("system", "user") and message.get("content") is None:
        raise invalid(f"{where}.content", "is missing")
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name) or "", str):
            raise invalid(f"{where}.{name}", "must be a string")
    known = ("name", "tool_calls", "tool_call_id", "reasoning_content")
    changed = {**{key: message[key] for key in known if message.get(key) is not None}, "role": ROLES[role]}
    if isinstance(message.get("reasoning"), str):  # as some servers call it
        changed.setdefault("reasoning_content", message["reasoning"])
    if not isinstance(changed.get("reasoning_content", ""), str):
        raise invalid(f"{where}.reasoning_content", "must be a string")
    return {**changed, "content": content}


def of_chat(error: UserError) -> ApiError:
    """The API's error for a wrong conversation, by the field that is at fault."""
    param, _, message = str(error).partition(": ")
    return invalid(param, message) if re.match(r"(messages|tools)\[", param) else ApiError(400, str(error), "messages")


def unread(kind: object, where: str, note: Callable[[str], None] | None) -> str:
    """The text in place of a part of a message that is none. Only results of tools may have such parts, since an agent
    sends them again with each turn; `note` is for these. Raises ApiError for parts of other messages."""
    if not note:
        raise invalid(where, f"parts of type {kind!r:.40} are not supported: this model reads text")
    note(f"parts of type {kind!r:.40} in results of tools are not shown to the model, which reads text")
    return f"[{kind!s:.40}: not shown, because this model reads only text]"


def _text(content: Any, where: str, note: Callable[[str], None] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal"):
            texts.append(unread(kind, f"{where}[{i}]", note))
            continue
        if not isinstance(text, str):
            raise invalid(f"{where}[{i}].{kind}", "must be a string")
        texts.append(text)
    return "\n".join(texts)


def tools_of(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model may call; none with tool_choice none."""
    given, names = request.tools or [], set()
    if len(given) > MOST_TOOLS:
        raise invalid("tools", f"{len(given)} tools are more than {MOST_TOOLS}")
    for i, tool in enumerate(given):
        if tool.get("type") != "function":
            raise invalid(f"tools[{i}].type", f"{tool.get('type')!r:.40} is not supported: only function is")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise invalid(f"tools[{i}].function.name", "must be 1 to 64 letters, digits, _, - or .")
        if name in names:
            raise invalid(f"tools[{i}].function.name", f"{name} stands twice")
        names.add(name)
        if not isinstance(tool["function"].get("parameters") or {}, Mapping):
            raise invalid(f"tools[{i}].function.parameters", "must be a JSON schema")
    return [] if request.tool_choice == "none" else given


def _forced_tools(request: ChatRequest, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of which one must be called; none if the model is free."""
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return []
    if not tools:
        raise invalid("tool_choice", "it needs tools")
    if choice == "required":
        return tools
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise invalid("tool_choice", f"{name or choice!r:.80} is none of none, auto, required and the tools' names")
    return named


def takes_tools(text: Text) -> bool:
    """Says whether the model is told of tools: by its chat template, or in a description."""
    format = text.format
    return format is not None and (renders_tools(text.tokenizer.template) or text.tokenizer.describes_tools(format))


def settings_of(request: ChatRequest, text: Text, note: Callable[[str], None]) -> dict[str, Any]:
    """Variables of the chat template, of those that it has. `note` is told what a model without a switch for its
    reasoning is asked for in vain."""
    settings: dict[str, Any] = {}
    template = text.tokenizer.template
    switch = reasoning_switch(template)
    for name, value in (request.chat_template_kwargs or {}).items():
        if name not in RESERVED and has_variable(template, name):
            settings[name] = value
        elif name in REASONING:
            note(f"chat_template_kwargs.{name}: {UNREAD}")
        else:
            raise invalid("chat_template_kwargs", f"{name:.40} is no variable of this model's chat template")
    thinking = request.thinking
    if isinstance(thinking, Thinking):
        thinking = thinking.type != "disabled"
    for name, wanted in (("enable_thinking", request.enable_thinking), ("thinking", thinking)):
        if wanted is not None and switch:
            settings.setdefault(switch, wanted)
        elif wanted is not None and wanted != text.reasons:
            note(f"{name}: {UNREAD}")
    if request.reasoning_effort is not None:
        if has_variable(template, "reasoning_effort"):
            settings["reasoning_effort"] = request.reasoning_effort
        elif switch:
            settings.setdefault(switch, request.reasoning_effort != "none")
        else:
            note(f"reasoning_effort: {UNREAD}")
    return settings


def reasoning_switch(template: str) -> str:
    """The variable of a template that turns reasoning on and off; empty: it has none."""
    if has_variable(template, "enable_thinking"):
        return "enable_thinking"
    return "thinking" if re.search(r"(?<![\w.])thinking is (not )?defined", template) else ""  # also a common word


def has_variable(template: str, name: str) -> bool:
    return name.isidentifier() and re.search(rf"(?<![\w.'\"]){re.escape(name)}(?![\w'\"])", template) is not None


def _whole_grammar(
    front: Front,
    request: ChatRequest,
    text: Text,
    grammar: Grammar | None,
    forced: list[dict[str, Any]],
    strict: list[dict[str, Any]],
    ids: list[int],
) -> Grammar | None:
    """The grammar of the whole answer, with the reasoning before its content. Tools that are `forced` are called; of
    those that are not, some are `strict`."""
    opened: bool | None = None
    tokenizer, marks = text.tokenizer, GrammarMarks(text.mark_ids)
    if text.format and tokenizer.opens_reasoning(ids):
        opened = True
    elif text.format and text.format.think in tokenizer.template and not tokenizer.ends_reasoning(ids):
        opened = False
    if forced or strict:
        several = (not forced or request.tool_choice == "required") and request.parallel_tool_calls is not False
        return calls_grammar(forced or strict, text.format, several, opened, marks, bool(forced), front.note)
    if grammar and text.format and text.format.tokens:
        return in_final_message(grammar, marks)
    if grammar and opened is not None:
        return after_reasoning(grammar, opened, marks, text.format)
    return grammar
