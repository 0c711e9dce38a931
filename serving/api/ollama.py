"""Ollama's API, translated to chats and completions: POST /api/chat, /api/generate and
/api/show, GET /api/tags, /api/ps and /api/version.

An answer is a stream of lines of JSON, unless `stream` is false.
"""

import json
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import msgspec

from umbra.executor.config.load import model_folder
from umbra.serving.api import openai_chat, openai_completions
from umbra.serving.api.errors import ApiError, invalid, renamed
from umbra.serving.api.fields import KnownFields, converted, typed
from umbra.serving.api.front import Front
from umbra.serving.api.request_log import Usage
from umbra.serving.api.sse import EventStream

PATH = "/api"
LATEST = ":latest"  # which Ollama's clients add to a model's name
KNOWN = KnownFields(
    harmless=frozenset({"keep_alive", "context"}),
    ignored={"logprobs": (False,), "top_logprobs": (0,)},
    refused={"images": ([],), "template": ("",), "suffix": ("",)},
)
# Options by their names in OpenAI's API. The others tune Ollama's own engine.
OPTIONS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")} | {
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
NEVER = "9999-12-31T23:59:59Z"
EMPTY = {"role": "assistant", "content": ""}


class OllamaRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None


class OllamaChat(OllamaRequest, kw_only=True):
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(OllamaRequest, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None


class ShowRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None  # as older clients call it
    verbose: bool | None = None


class JsonLines(EventStream):
    """A stream of lines of JSON, between which nothing else may stand."""

    media_type = "application/x-ndjson"
    ping = b""


def line(data: dict[str, Any]) -> bytes:
    return msgspec.json.encode(data) + b"\n"


def failure(error: ApiError) -> bytes:
    """The last line of a stream that fails."""
    return line(envelope(error))


def envelope(error: ApiError) -> dict[str, Any]:
    return {"error": str(error)}


@dataclass
class OllamaAnswer:
    """A request that was read and can run; None in place of a job: it only asks for the model to be loaded."""

    front: Front
    job: "openai_chat.ReadChat | openai_completions.ReadCompletion | None"
    stream: bool
    chats: bool  # whether answers are messages, or else texts
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0  # when the first token came

    async def parts(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as it comes; the last part has the reason of its end and the counts."""
        calls: list[tuple[str, list[str]]] = []
        finish = "load"
        if isinstance(self.job, openai_completions.ReadCompletion):
            async with aclosing(self.job.parts()) as parts:
                async for part in parts:
                    if part.text:
                        yield self._part("content", part.text)
                    finish = part.finish or finish
        elif self.job:
            async with aclosing(self.job.deltas()) as deltas:
                async for delta in deltas:
                    if delta.kind == "call":
                        calls.append((delta.text, []))
                    elif delta.kind == "arguments":
                        calls[-1][1].append(delta.text)
                    elif delta.kind == "finish":
                        finish = "length" if delta.text == "length" else "stop"
                    elif delta.kind in ("content", "reasoning") and delta.text:
                        yield self._part(delta.kind, delta.text)
        if self.chats and (called := list(whole_calls(calls))):
            yield self._body({"message": EMPTY | {"tool_calls": called}}, done=False)
        yield self._end(finish)

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        self.first = self.first or time.monotonic()
        if self.chats:
            said = {"thinking" if kind == "reasoning" else "content": text}
            return self._body({"message": EMPTY | said}, done=False)
        said = {"thinking" if kind == "reasoning" else "response": text}
        return self._body({"response": ""} | said, done=False)

    def _end(self, finish: str) -> dict[str, Any]:
        now = time.monotonic()
        first, usage = self.first or now, self.job.usage if self.job else Usage()
        counts = {
            "total_duration": nanoseconds(now - self.began),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": nanoseconds(first - self.began),
            "eval_count": usage.completion,
            "eval_duration": nanoseconds(now - first),
        }
        said: dict[str, Any] = {"message": EMPTY} if self.chats else {"response": ""}
        return self._body(said, done=True, done_reason=finish, **counts)

    def _body(self, said: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"model": self.front.name, "created_at": stamp(time.time()), **said, **more}


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def whole_calls(calls: Iterable[tuple[str, list[str]]]) -> Iterable[dict[str, Any]]:
    """The calls whose arguments came whole; Ollama's API has no others."""
    for name, pieces in calls:
        try:
            arguments = json.loads("".join(pieces))
        except ValueError:
            continue
        yield {"function": {"name": name, "arguments": arguments}}


async def prepare_chat(front: Front, data: Any, salt: bytes) -> OllamaAnswer:
    """Reads a request to /api/chat. Raises ApiError if it is wrong."""
    request = read(front, OllamaChat, data)
    asked = shared_fields(front, request) | {"messages": messages_of(request.messages), "tools": request.tools}
    return await _chat(front, request, asked, salt, chats=True)


async def prepare_generate(front: Front, data: Any, salt: bytes) -> OllamaAnswer:
    """Reads a request to /api/generate. Raises ApiError if it is wrong."""
    request = read(front, OllamaGenerate, data)
    asked = shared_fields(front, request)
    if request.raw:
        given = {name: value for name, value in asked.items() if name not in openai_chat.REASONING}
        try:
            job = await openai_completions.prepare(
                front, {"max_tokens": 1 << 30, **given, "prompt": request.prompt}, salt
            )
        except ApiError as error:
            raise own(error) from None
        return OllamaAnswer(front, job, request.stream is not False, chats=False)
    system = [{"role": "system", "content": request.system}] if request.system else []
    asked["messages"] = [*system, {"role": "user", "content": request.prompt}] if request.prompt else []
    return await _chat(front, request, asked, salt, chats=False)


async def _chat(front: Front, request: OllamaRequest, asked: dict[str, Any], salt: bytes, chats: bool) -> OllamaAnswer:
    job = None
    if asked["messages"]:  # else the model is only to be loaded, which it is
        try:
            job = await openai_chat.prepare(front, asked, salt)
        except ApiError as error:
            raise own(error) from None
    return OllamaAnswer(front, job, request.stream is not False, chats)


def own(error: ApiError) -> ApiError:
    """`error` with Ollama's names of fields."""
    names = {theirs: f"options.{name}" for name, theirs in OPTIONS.items()}
    return renamed(error, names | {"response_format": "format", "reasoning_effort": "think", "thinking": "think"})


def read(front: Front, kind: type[Any], data: Any) -> Any:
    """The request in `data` as a `kind`. Raises ApiError unless the model is served and known."""
    front.check_serving()
    request = converted(kind, data, KNOWN, front.note)
    front.check_model(request.model and request.model.removesuffix(LATEST))
    return request


def shared_fields(front: Front, request: OllamaRequest) -> dict[str, Any]:
    """The fields of OpenAI's API that chats and texts have from `request`."""
    fields: dict[str, Any] = {}
    for name, value in (request.options or {}).items():
        if name not in OPTIONS:
            front.note(f"options.{name[:64]}: nothing reads it")
        elif name == "num_predict" and isinstance(value, int) and value < 0:
            continue  # no limit
        else:
            fields[OPTIONS[name]] = value
    if request.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(request.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": request.format}}
    elif request.format:
        raise invalid("format", "must be json or a JSON schema")
    if isinstance(request.think, str):
        fields["reasoning_effort"] = request.think
    elif request.think is not None:
        fields["thinking"] = request.think
    return fields


def messages_of(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as OpenAI's API has them: calls get the ids that Ollama's lack, and results those of their calls."""
    messages, waiting, count = [], list[str](), 0
    for i, message in enumerate(given):
        if message.get("images"):
            raise invalid(f"messages[{i}].images", "this model reads text")
        changed: dict[str, Any] = {name: message[name] for name in ("role", "content") if name in message}
        if message.get("thinking"):
            changed["reasoning_content"] = message["thinking"]
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
                raise invalid(f"messages[{i}].tool_calls", "must be a list of calls")
            waiting = [str(call.get("id") or f"call_{count + j}") for j, call in enumerate(calls)]
            count += len(calls)
            changed["tool_calls"] = [
                {"id": id, "type": "function", "function": call.get("function")}
                for id, call in zip(waiting, calls, strict=True)
            ]
        if message.get("role") == "tool":
            id = message.get("tool_call_id") or (waiting.pop(0) if waiting else "")
            changed |= {"tool_call_id": id} if id else {}
            if name := message.get("tool_name"):
                changed["name"] = name
        messages.append(changed)
    return messages


async def whole(answer: OllamaAnswer) -> dict[str, Any]:
    """The answer to a request with `stream: false`."""
    said: dict[str, list[str]] = {"thinking": [], "content": [], "response": []}
    calls: list[dict[str, Any]] = []
    part: dict[str, Any] = {}
    async with aclosing(answer.parts()) as parts:
        async for part in parts:
            fields = part.get("message", part)
            for name, texts in said.items():
                texts.append(fields.get(name, ""))
            calls += fields.get("tool_calls", [])
    text = "".join(said["content" if answer.chats else "response"])
    thinking = {"thinking": "".join(said["thinking"])} if any(said["thinking"]) else {}
    if answer.chats:
        message = {"role": "assistant", "content": text, **thinking} | ({"tool_calls": calls} if calls else {})
        return part | {"message": message}
    return part | {"response": text, **thinking}


async def events(answer: OllamaAnswer) -> AsyncGenerator[bytes, None]:
    """The answer as lines."""
    async with aclosing(answer.parts()) as parts:
        async for part in parts:
            yield line(part)


async def show(front: Front, data: Any) -> dict[str, Any]:
    """Answers POST /api/show: what there is to know of the model."""
    _, text = front.check_serving()
    request = typed(ShowRequest, data)
    front.check_model((request.model or request.name or "").removesuffix(LATEST))
    capabilities = ["completion"]
    capabilities += ["tools"] if openai_chat.takes_tools(text) else []
    capabilities += ["thinking"] if text.reasons else []
    family = front.case.model_name
    longest = front.client.ready.longest if front.client.ready else front.case.max_sequence_length
    return {
        "modelfile": f"FROM {front.name}",
        "parameters": "",
        "template": text.tokenizer.template,
        "details": details(front),
        "model_info": {"general.architecture": family, f"{family}.context_length": longest},
        "capabilities": capabilities,
        "modified_at": stamp(front.created),
    }


def details(front: Front) -> dict[str, Any]:
    family = front.case.model_name
    unknown = {"parameter_size": "", "quantization_level": "", "parent_model": ""}
    return {"format": "", "family": family, "families": [family], **unknown}


def tags(front: Front) -> dict[str, Any]:
    """The models of GET /api/tags: the one that there is, under each of its names."""
    return {"models": [shown | {"modified_at": stamp(front.created)} for shown in models(front)]}


def running(front: Front) -> dict[str, Any]:
    """The models of GET /api/ps, which are loaded: the same."""
    return {"models": [shown | {"expires_at": NEVER, "size_vram": 0} for shown in models(front)]}


def models(front: Front) -> list[dict[str, Any]]:
    size = sum(file.stat().st_size for file in model_folder(front.case).iterdir() if file.is_file())
    shared = {"size": size, "digest": "", "details": details(front)}
    return [{"name": f"{name}{LATEST}", "model": f"{name}{LATEST}", **shared} for name in front.names]
