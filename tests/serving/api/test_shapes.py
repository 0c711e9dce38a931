"""What each API makes of the same pieces of an answer, event by event, without a server."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from serving.api import anthropic, blocks, openai_chat, openai_completions, responses, streams
from serving.api.blocks import Block, Blocks, Change
from serving.api.errors import ApiError
from serving.api.fields import StreamOptions
from serving.api.front import Job
from serving.api.openai_chat import Chat, ChatRequest, Delta
from serving.api.openai_completions import Completion, CompletionRequest, Part
from serving.api.streams import Piece, Token, Usage
from serving.ranks.messages import Sampling, TokenLogprob, TopToken
from text.formats import FORMATS

USAGE = {
    "prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 2},
}  # fmt: skip


def token(id: int, start: int = 0) -> Token:
    """Its text is the character of this number; its log-probability is a tenth of that, below zero."""
    return Token(id, TokenLogprob(-id / 10, [TopToken(id + 1, -1.0)]), start)


def entry(id: int) -> dict[str, Any]:
    return {
        "token": chr(id), "logprob": -id / 10, "bytes": [id],
        "top_logprobs": [{"token": chr(id + 1), "logprob": -1.0, "bytes": [id + 1]}],
    }  # fmt: skip


class Said(Chat):
    """A chat whose deltas are known."""

    given: Sequence[Delta] = ()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        for number, delta in enumerate(self.given):
            self.usage.completion = min(number + 1, 4)
            yield delta


def text_of(opened: bool = False) -> Any:
    tokenizer = SimpleNamespace(opens_reasoning=lambda ids: opened)
    return SimpleNamespace(tokenizer=tokenizer, splits=True, token_bytes=lambda id, ready: bytes([id]))


def said(*given: Delta, **fields: Any) -> Said:
    front: Any = SimpleNamespace(name="m")
    job = Job([1, 2], Sampling(5, temperature=0.5, top_p=0.25, seed=7))
    ready: Any = None
    chat = Said(front, ChatRequest(**fields), text_of(), ready, job, [], None, Usage(9, 2), "chatcmpl-1", 77)
    chat.given = given
    return chat


def found(events: AsyncGenerator[bytes, None]) -> list[Any]:
    """The data of server-sent events; an event's name is that of its type."""

    async def all_of() -> list[bytes]:
        return [data async for data in events]

    told: list[Any] = []
    for block in asyncio.run(all_of()):
        *name, data, end, more = block.decode().split("\n")
        assert (end, more) == ("", "")
        event: Any = "[DONE]" if data == "data: [DONE]" else json.loads(data.removeprefix("data: "))
        assert name == ([f"event: {event['type']}"] if name else [])
        told.append(event)
    return told


REASON, CONTENT = Delta(0, "reasoning", "Hm"), Delta(0, "content", "Yes", tokens=[token(65)])
CALL = Delta(0, "call", "look", 0, "call_0")
TALK = [
    REASON, CONTENT, CALL, Delta(0, "arguments", '{"a":', 0, "call_0"), Delta(0, "arguments", "1}", 0, "call_0"),
    Delta(0, "end", "", 0, "call_0"), Delta(0, "finish", "tool_calls"),
]  # fmt: skip


def test_deltas_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's parts have its number and id; tokens go with the first delta behind them, or with the finish."""
    ids = iter("0123")
    monkeypatch.setattr("serving.api.openai_chat.secrets.token_hex", lambda size: next(ids) * (size // 12))
    call = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look"}}]
    one, two, three = token(65), token(66), token(67)

    def deltas(*pieces: Piece, opened: bool = False, parallel: bool | None = None) -> list[Delta]:
        async def given() -> AsyncGenerator[Piece, None]:
            for piece in pieces:
                yield piece
            raise AssertionError("nothing is read behind a finish")

        chat = said(parallel_tool_calls=parallel)
        chat.text, chat.format, chat.tools = text_of(opened), FORMATS["qwen3"], tools

        async def all_of() -> list[Delta]:
            return [replace(delta, tokens=(*delta.tokens,)) async for delta in chat._deltas(3, given())]

        return asyncio.run(all_of())

    pieces = [Piece("Hm</think>\n\nYe", [one]), Piece("s", [two]), Piece("", [three], "stop", "END")]
    assert deltas(*pieces, opened=True) == [
        Delta(3, "reasoning", "Hm", tokens=(one,)), Delta(3, "content", "Ye"), Delta(3, "content", "s", tokens=(two,)),
        Delta(3, "finish", "stop", tokens=(three,), stop="END"),
    ]  # fmt: skip
    both = [Piece("a\n" + call, [one]), Piece("\n" + call, [two]), Piece("", [], "stop")]
    first = [Delta(3, "call", "look", 0, "call_0"), Delta(3, "arguments", '{"a": 1}', 0, "call_0")]
    first.append(Delta(3, "end", "", 0, "call_0"))
    for parallel in (None, True):
        ids = iter("0123")
        parts = deltas(*both, parallel=parallel)
        assert parts[0] == Delta(3, "content", "a", tokens=(one,))
        second = parts[4:-1]
        assert [(d.kind, d.text, d.call, d.call_id) for d in second] == [
            ("call", "look", 1, "call_1"), ("arguments", '{"a": 1}', 1, "call_1"), ("end", "", 1, "call_1"),
        ]  # fmt: skip
        assert [d.tokens for d in second] == [(two,), (), ()]
        assert [*parts[1:4], parts[-1]] == [*first, Delta(3, "finish", "tool_calls")]
    ids = iter("0123")
    only = deltas(*both, parallel=False)
    assert only == [Delta(3, "content", "a", tokens=(one,)), *first, Delta(3, "finish", "tool_calls", tokens=(two,))]
    ids = iter("0123")
    assert deltas(Piece(call, []), Piece("", [], "length"))[-1] == Delta(3, "finish", "length")
    ids = iter("0123")
    assert deltas(Piece(call, []), Piece("", [], "stop"))[-1] == Delta(3, "finish", "tool_calls")
    ids = iter("0123")
    behind = deltas(Piece(f"{call}\n{call}\nmore", []), Piece("", [], "stop"), parallel=False)
    assert [(delta.kind, delta.text) for delta in behind[3:]] == [("content", "more"), ("finish", "tool_calls")]
    assert deltas(Piece("held back <tool", []), Piece("", [], "length")) == [
        Delta(3, "content", "held back "), Delta(3, "content", "<tool"), Delta(3, "finish", "length"),
    ]  # fmt: skip


class Streamed:
    """Stands for streams: each has one piece, whose text is its seed, and what it was made of."""

    def __init__(self, *of: Any):
        self.of = of
        self.job = of[3]
        self.prompt_logprobs = [TokenLogprob(-0.5, [])]

    async def pieces(self, ticket: Any) -> AsyncGenerator[Piece, None]:
        yield Piece(f"{self.job.sampling.seed}{ticket.name}", [token(65)], "stop")


@pytest.mark.parametrize("choices", [1, 3])
def test_every_choice_of_a_chat_has_a_stream(monkeypatch: pytest.MonkeyPatch, choices: int) -> None:
    made: list[Any] = []

    def stream(*of: Any) -> Streamed:
        made.append(of)
        return Streamed(*of)

    monkeypatch.setattr(openai_chat, "Stream", stream)
    admitted: list[tuple[int, int]] = []
    ticket = SimpleNamespace(places=2, name="t")

    def admit(tokens: int, sequences: int) -> Any:
        admitted.append((tokens, sequences))
        return nullcontext(ticket)

    chat: Any = said(n=choices)
    chat.front.admit = admit

    async def all_of() -> list[Delta]:
        return [delta async for delta in Chat.deltas(chat)]

    deltas = asyncio.run(all_of())
    texts = sorted((d.index, d.text) for d in deltas if d.kind == "content")
    assert texts == [(n, f"{7 + n}t") for n in range(choices)]
    assert sorted(d.index for d in deltas if d.kind == "finish") == list(range(choices))
    assert admitted == [(2, choices)]
    assert [of[:3] + of[4:] for of in made] == [(chat.front, chat.text, chat.ready, chat.usage)] * choices


def message_of(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "refusal": None, **more}


def test_a_whole_chat() -> None:
    look = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    chat = said(*TALK, Delta(1, "content", "a"), Delta(1, "content", "b"), Delta(1, "finish", "stop"), n=2)
    assert asyncio.run(openai_chat.whole(chat)) == {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 77, "model": "m", "usage": USAGE,
        "choices": [
            {
                "index": 0, "message": message_of("Yes", reasoning_content="Hm", tool_calls=[look]), "logprobs": None,
                "finish_reason": "tool_calls",
            },
            {"index": 1, "message": message_of("ab"), "logprobs": None, "finish_reason": "stop"},
        ],
    }  # fmt: skip
    only = asyncio.run(openai_chat.whole(said(CALL, Delta(0, "finish", "stop"))))
    assert only["choices"][0]["message"]["content"] is None
    assert asyncio.run(openai_chat.whole(said(Delta(0, "finish", "stop"))))["choices"][0]["message"] == message_of("")
    last = Delta(0, "finish", "stop", tokens=[token(66)])
    (choice,) = asyncio.run(openai_chat.whole(said(CONTENT, last, logprobs=True)))["choices"]
    assert choice["logprobs"] == {"content": [entry(65), entry(66)], "refusal": None}


def chunks(*deltas: Delta, **fields: Any) -> list[tuple[Any, ...]]:
    """Of a streamed chat: index, delta, log-probabilities and reason of each chunk, and its usage if it has one."""
    told = found(openai_chat.events(said(*deltas, **fields)))
    assert told.pop() == "[DONE]"
    rows: list[tuple[Any, ...]] = []
    for event in told:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 77, "model": "m"}
        assert {key: event[key] for key in head} == head
        (choice,) = event["choices"] or [None]
        usage = (event["usage"],) if "usage" in event else ()
        rows.append(
            (*(choice[k] for k in ("index", "delta", "logprobs", "finish_reason")), *usage) if choice else usage
        )
    return rows


def test_a_streamed_chat() -> None:
    opening = {"role": "assistant", "content": "", "refusal": None}

    def called(**what: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": 0, **what}]}

    look = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": ""}}
    assert chunks(*TALK) == [
        (0, opening, None, None), (0, {"reasoning_content": "Hm"}, None, None), (0, {"content": "Yes"}, None, None),
        (0, called(**look), None, None), (0, called(function={"arguments": '{"a":'}), None, None),
        (0, called(function={"arguments": "1}"}), None, None), (0, {}, None, "tool_calls"),
    ]  # fmt: skip
    two = [Delta(1, "content", "a"), Delta(0, "content", "b"), Delta(1, "finish", "stop"), Delta(0, "finish", "length")]
    assert [(row[0], row[1].get("content"), row[3]) for row in chunks(*two)] == [
        (1, "", None), (1, "a", None), (0, "", None), (0, "b", None), (1, None, "stop"), (0, None, "length"),
    ]  # fmt: skip


def test_log_probabilities_and_usage_of_a_streamed_chat() -> None:
    """The last chunk says nothing but why the answer has ended; the end of a call is told for its tokens alone."""
    one, two, three = ({"content": [entry(id)], "refusal": None} for id in (65, 66, 67))
    empty: dict[str, Any] = {"content": [], "refusal": None}
    end, last = Delta(0, "end", "", 0, "c", [token(66)]), Delta(0, "finish", "stop", tokens=[token(67)])
    rows = chunks(CONTENT, end, Delta(0, "end", "", 0, "c"), last, logprobs=True)
    opening = {"role": "assistant", "content": "", "refusal": None}
    assert rows == [
        (0, opening, None, None), (0, {"content": "Yes"}, one, None), (0, {}, two, None),
        (0, {"content": ""}, three, None), (0, {}, None, "stop"),
    ]  # fmt: skip
    assert chunks(Delta(0, "content", "a"), Delta(0, "finish", "stop"), logprobs=True)[1][2] == empty
    given = [Delta(0, "content", "a"), Delta(0, "finish", "stop")]
    options: dict[str, Any] = {"stream_options": openai_stream(include_usage=True)}
    assert [row[-1] for row in chunks(*given, **options)] == [None, None, None, usage_of(2)]
    options = {"stream_options": openai_stream(include_usage=True, continuous_usage_stats=True)}
    each = [usage_of(1), usage_of(1), usage_of(2), usage_of(2)]
    assert [row[-1] for row in chunks(*given, **options)] == each
    assert all(len(row) == 4 for row in chunks(*given))


def openai_stream(**options: bool) -> StreamOptions:
    return StreamOptions(**options)


def usage_of(tokens: int) -> dict[str, Any]:
    return USAGE | {"completion_tokens": tokens, "total_tokens": 9 + tokens}


def changes_of(*deltas: Delta) -> tuple[Blocks, list[Change]]:
    given = Blocks(said(*deltas))

    async def all_of() -> list[Change]:
        return [change async for change in given.changes()]

    return given, asyncio.run(all_of())


def test_blocks_of_deltas() -> None:
    """A block goes on as long as its kind; a call behind a call is another block."""
    other = Delta(0, "call", "go", 1, "call_1")
    last = Delta(0, "finish", "length", tokens=[token(67)], stop="END")
    given, changes = changes_of(REASON, *TALK[:-1], other, Delta(0, "arguments", "{}", 1, "call_1"), last)
    thought, text = Block("reasoning", 0, pieces=["Hm", "Hm"]), Block("content", 1, pieces=["Yes"])
    look = Block("call", 2, "look", "call_0", ['{"a":', "1}"])
    go = Block("call", 3, "go", "call_1", ["{}"])
    assert changes == [
        Change("open", thought), Change("text", thought, "Hm"), Change("text", thought, "Hm"), Change("close", thought),
        Change("open", text), Change("text", text, "Yes", [token(65)]), Change("close", text),
        Change("open", look), Change("text", look, '{"a":'), Change("text", look, "1}"), Change("close", look),
        Change("open", go), Change("text", go, "{}"), Change("close", go, "length"),
        Change("end", Block("", 4), "length", [token(67)], "END"),
    ]  # fmt: skip
    assert given.found == [thought, text, look, go]
    assert look.text == '{"a":1}'
    assert given.reasoning_tokens == 2
    given, changes = changes_of(Delta(0, "finish", "stop"))
    assert (given.found, given.reasoning_tokens, changes) == ([], 0, [Change("end", Block("", 0), "stop")])


MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}


def counted(output: int, thinking: int) -> dict[str, Any]:
    return {
        "input_tokens": 7, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": thinking},
    }  # fmt: skip


def messages_answer(*deltas: Delta) -> anthropic.Answer:
    chat = said(*deltas)
    return anthropic.Answer(chat, True, Blocks(chat), "msg_1")


def test_a_whole_message() -> None:
    assert asyncio.run(anthropic.whole(messages_answer(*TALK))) == {
        **MESSAGE, "stop_reason": "tool_use", "stop_sequence": None, "usage": counted(4, 1),
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "unsigned"}, {"type": "text", "text": "Yes"},
            {"type": "tool_use", "id": "call_0", "name": "look", "input": {"a": 1}},
        ],
    }  # fmt: skip
    for end, reason, stop in (
        (Delta(0, "finish", "stop"), "end_turn", None),
        (Delta(0, "finish", "length"), "max_tokens", None),
        (Delta(0, "finish", "stop", stop="END"), "stop_sequence", "END"),
    ):
        body = asyncio.run(anthropic.whole(messages_answer(end)))
        assert (body["stop_reason"], body["stop_sequence"], body["content"]) == (reason, stop, [])


@pytest.mark.parametrize(
    ("pieces", "input"), [([], {}), (['{"a"', ":1}"], {"a": 1}), (['{"a"'], {}), (["[1]"], {}), (["3"], {})]
)
def test_arguments_that_are_cut_off_are_none(pieces: list[str], input: dict[str, Any]) -> None:
    block = anthropic._block(Block("call", 0, "look", "c", pieces))
    assert block == {"type": "tool_use", "id": "c", "name": "look", "input": input}


def test_a_streamed_message() -> None:
    def start(index: int, block: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def delta(index: int, kind: str, **what: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **what}}

    def stop(index: int) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": index}

    assert found(anthropic.events(messages_answer(*TALK))) == [
        {
            "type": "message_start",
            "message": {**MESSAGE, "content": [], "stop_reason": None, "stop_sequence": None, "usage": counted(1, 1)},
        },
        start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, "thinking_delta", thinking="Hm"), delta(0, "signature_delta", signature="unsigned"), stop(0),
        start(1, {"type": "text", "text": ""}), delta(1, "text_delta", text="Yes"), stop(1),
        start(2, {"type": "tool_use", "id": "call_0", "name": "look", "input": {}}),
        delta(2, "input_json_delta", partial_json='{"a":'), delta(2, "input_json_delta", partial_json="1}"), stop(2),
        {
            "type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": counted(4, 1),
        },
        {"type": "message_stop"},
    ]  # fmt: skip


ERRORS = [
    (400, "invalid_request_error"), (401, "authentication_error"), (402, "invalid_request_error"),
    (403, "permission_error"), (404, "not_found_error"), (405, "invalid_request_error"), (408, "timeout_error"),
    (409, "invalid_request_error"), (413, "request_too_large"), (414, "invalid_request_error"),
    (429, "rate_limit_error"), (430, "invalid_request_error"), (499, "invalid_request_error"), (500, "api_error"),
    (503, "overloaded_error"), (504, "api_error"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "kind"), ERRORS)
def test_errors_of_messages(status: int, kind: str) -> None:
    error = ApiError(status, "why")
    assert anthropic.envelope(error) == {"type": "error", "error": {"type": kind, "message": "why"}}
    assert anthropic.failure(error).startswith(b'event: error\ndata: {"type":"error",')


def response_of(*deltas: Delta, logprobs: bool = False, **fields: Any) -> responses.Answer:
    request = responses.ResponsesRequest(input="Hi", **fields)
    chat = said(*deltas, logprobs=logprobs)
    return responses.Answer(request, chat, Blocks(chat), "k")


HEAD = {
    "id": "resp_k", "object": "response", "created_at": 77, "error": None, "incomplete_details": None,
    "instructions": None, "max_output_tokens": None, "model": "m", "parallel_tool_calls": True,
    "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "store": False, "temperature": 0.5,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 0.25,
    "truncation": "disabled", "metadata": {}, "usage": None,
}  # fmt: skip


def used(output: int, thinking: int) -> dict[str, Any]:
    return {
        "input_tokens": 9, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": output, "output_tokens_details": {"reasoning_tokens": thinking}, "total_tokens": 9 + output,
    }  # fmt: skip


def items_of(status: str = "completed") -> list[dict[str, Any]]:
    part = {"type": "output_text", "text": "Yes", "annotations": [], "logprobs": []}
    return [
        {
            "id": "rs_k0", "type": "reasoning", "status": "completed", "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {"id": "msg_k1", "type": "message", "status": "completed", "role": "assistant", "content": [part]},
        {
            "id": "fc_k2", "type": "function_call", "status": status, "call_id": "call_0", "name": "look",
            "arguments": '{"a":1}',
        },
    ]  # fmt: skip


def test_a_whole_response() -> None:
    body = {**HEAD, "status": "completed", "output": items_of(), "usage": used(4, 1)}
    assert asyncio.run(responses.whole(response_of(*TALK))) == body
    cut = asyncio.run(responses.whole(response_of(*TALK[:-1], Delta(0, "finish", "length"))))
    reason = {"incomplete_details": {"reason": "max_output_tokens"}}
    assert cut == {**body, "status": "incomplete", "output": items_of("incomplete"), **reason}
    empty = asyncio.run(responses.whole(response_of(Delta(0, "finish", "stop"))))
    assert (empty["output"], empty["status"], empty["usage"]) == ([], "completed", used(1, 0))


def test_a_response_says_what_was_asked_for() -> None:
    format = responses.Format(type="json_schema", name="n", schema={"x": 1})
    tools = [responses.Tool(type="function", name="a"), responses.Tool(type="function", name="b", strict=True)]
    answer = response_of(
        instructions="Be brief.", max_output_tokens=5, parallel_tool_calls=False, tools=tools, top_logprobs=2,
        tool_choice="required", reasoning=responses.Reasoning(effort="low"), text=responses.TextConfig(format=format),
    )  # fmt: skip
    body = answer.response("in_progress", [], None)
    tool = {"type": "function", "description": None, "parameters": None}
    assert body == {
        **HEAD, "status": "in_progress", "output": [], "instructions": "Be brief.", "max_output_tokens": 5,
        "parallel_tool_calls": False, "top_logprobs": 2, "tool_choice": "required",
        "reasoning": {"effort": "low", "summary": None},
        "tools": [{**tool, "name": "a", "strict": False}, {**tool, "name": "b", "strict": True}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"x": 1}}},
    }  # fmt: skip
    assert response_of(text=responses.TextConfig()).response("failed", [])["text"] == {"format": {"type": "text"}}
    assert response_of(parallel_tool_calls=True).response("failed", [])["parallel_tool_calls"] is True
    streams = [response_of(stream=stream).stream for stream in (None, False, True)]
    assert streams == [False, False, True]


def test_a_streamed_response() -> None:
    events = found(responses.events(response_of(*TALK)))
    assert [event.pop("sequence_number") for event in events] == list(range(len(events)))
    begun = {**HEAD, "status": "in_progress", "output": []}
    thought, message, call = items_of()
    opened = [thought | {"status": "in_progress", "content": []}, message | {"status": "in_progress", "content": []}]
    opened.append(call | {"status": "in_progress", "arguments": ""})

    def at(number: int, part: bool = True) -> dict[str, Any]:
        item = {"item_id": items_of()[number]["id"], "output_index": number}
        return item | {"content_index": 0} if part else item

    thinking, text = thought["content"][0], message["content"][0]
    added, done = "response.output_item.added", "response.output_item.done"
    part_added, part_done = "response.content_part.added", "response.content_part.done"
    assert events == [
        {"type": "response.created", "response": begun}, {"type": "response.in_progress", "response": begun},
        {"type": added, "output_index": 0, "item": opened[0]},
        {"type": part_added, **at(0), "part": thinking | {"text": ""}},
        {"type": "response.reasoning_text.delta", **at(0), "delta": "Hm"},
        {"type": "response.reasoning_text.done", **at(0), "text": "Hm"},
        {"type": part_done, **at(0), "part": thinking}, {"type": done, "output_index": 0, "item": thought},
        {"type": added, "output_index": 1, "item": opened[1]},
        {"type": part_added, **at(1), "part": text | {"text": ""}},
        {"type": "response.output_text.delta", **at(1), "delta": "Yes", "logprobs": []},
        {"type": "response.output_text.done", **at(1), "text": "Yes", "logprobs": []},
        {"type": part_done, **at(1), "part": text}, {"type": done, "output_index": 1, "item": message},
        {"type": added, "output_index": 2, "item": opened[2]},
        {"type": "response.function_call_arguments.delta", **at(2, False), "delta": '{"a":'},
        {"type": "response.function_call_arguments.delta", **at(2, False), "delta": "1}"},
        {"type": "response.function_call_arguments.done", **at(2, False), "arguments": '{"a":1}'},
        {"type": done, "output_index": 2, "item": call},
        {
            "type": "response.completed",
            "response": {**HEAD, "status": "completed", "output": items_of(), "usage": used(4, 1)},
        },
    ]  # fmt: skip


def test_a_response_that_is_cut_off_is_streamed_as_such() -> None:
    events = found(responses.events(response_of(*TALK[:-1], Delta(0, "finish", "length"))))
    assert events[-2]["item"]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"] == items_of("incomplete")


def test_log_probabilities_of_a_response() -> None:
    """Those of text alone, and at the end all of them."""
    given = [
        Delta(0, "reasoning", "Hm", tokens=[token(70)]), CONTENT, Delta(0, "content", "!", tokens=[token(66)]),
        Delta(0, "content", "?"), Delta(0, "finish", "stop"),
    ]  # fmt: skip
    both = [entry(65), entry(66)]
    events = found(responses.events(response_of(*given, logprobs=True)))
    told = [event["logprobs"] for event in events if "logprobs" in event]
    assert told == [[entry(65)], [entry(66)], [], both]
    assert events[-1]["response"]["output"][1]["content"][0]["logprobs"] == both
    whole = asyncio.run(responses.whole(response_of(*given, logprobs=True)))
    assert whole["output"][1]["content"][0]["logprobs"] == both


def test_a_response_that_fails() -> None:
    """Before its first event, it is an error; behind that, a response with what there is of it."""
    answer = response_of(*TALK)
    error = ApiError(500, "it broke", "input", "engine_gone")
    first = json.loads(answer.failure(error).split(b"data: ")[1])
    assert first == {
        "type": "error", "sequence_number": 0, "code": "engine_gone", "message": "it broke", "param": "input",
    }  # fmt: skip
    assert answer.sent == 1
    answer.blocks.found.append(Block("content", 0, pieces=["Ye"]))
    failed = json.loads(answer.failure(error).split(b"data: ")[1])
    part = {"type": "output_text", "text": "Ye", "annotations": [], "logprobs": []}
    item = {"id": "msg_k0", "type": "message", "status": "incomplete", "role": "assistant", "content": [part]}
    shown = {"code": "server_error", "message": "it broke"}
    response = {**HEAD, "status": "failed", "output": [item], "error": shown}
    assert failed == {"type": "response.failed", "sequence_number": 1, "response": response}


class Continued(Completion):
    """A completion whose parts are known."""

    given: Sequence[Part] = ()

    async def parts(self) -> AsyncGenerator[Part, None]:
        for number, part in enumerate(self.given):
            self.usage.completion = min(number + 1, 4)
            yield part


def completion(*given: Part, jobs: int = 1, prompts: Sequence[str] = ("Hi",), **fields: Any) -> Continued:
    front: Any = SimpleNamespace(name="m")
    ready: Any = None
    job = Job([72, 105], Sampling(5, seed=7))
    request = CompletionRequest(**fields)
    made = Continued(front, request, text_of(), ready, [job] * jobs, [*prompts], Usage(9, 2), "cmpl-1", 77)
    made.given = given
    return made


def choice(index: int, text: str, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def lists(*ids: int) -> dict[str, Any]:
    return {
        "text_offset": [*ids], "token_logprobs": [-0.5] * len(ids), "tokens": [chr(id) for id in ids],
        "top_logprobs": None,
    }  # fmt: skip


def test_a_whole_completion() -> None:
    head = {"id": "cmpl-1", "object": "text_completion", "created": 77, "model": "m"}
    given = [Part(1, "a"), Part(0, "x"), Part(1, "b", "length"), Part(0, "", "stop")]
    choices = [choice(0, "x", "stop"), choice(1, "ab", "length")]
    assert asyncio.run(openai_completions.whole(completion(*given))) == {**head, "choices": choices, "usage": USAGE}
    given = [Part(0, "a", logprobs=lists(65)), Part(0, "b"), Part(0, "c", "stop", lists(66, 67))]
    (only,) = asyncio.run(openai_completions.whole(completion(*given)))["choices"]
    assert only == choice(0, "abc", "stop", lists(65, 66, 67))


def test_a_streamed_completion() -> None:
    head = {"id": "cmpl-1", "object": "text_completion", "created": 77, "model": "m"}
    given = [Part(0, "a"), Part(0, "b", "stop", lists(65))]
    choices = [[choice(0, "a")], [choice(0, "b", "stop", lists(65))]]

    def streamed(**options: bool) -> list[Any]:
        fields: dict[str, Any] = {"stream_options": openai_stream(**options)} if options else {}
        return found(openai_completions.events(completion(*given, **fields)))

    assert streamed() == [*({**head, "choices": c} for c in choices), "[DONE]"]
    rows = [*choices, []]
    with_usage = [{**head, "choices": c, "usage": u} for c, u in zip(rows, [None, None, usage_of(2)], strict=True)]
    assert streamed(include_usage=True) == [*with_usage, "[DONE]"]
    each = [{**head, "choices": c, "usage": usage_of(n)} for c, n in zip(rows, [1, 2, 2], strict=True)]
    assert streamed(include_usage=True, continuous_usage_stats=True) == [*each, "[DONE]"]
    assert streamed(include_usage=False)[0] == {**head, "choices": choices[0]}


class Detokenizer:
    def push(self, ids: tuple[int, ...]) -> str:
        return "".join(map(chr, ids))


def parts_of(given: Any, *pieces: Piece, prompt: int = 0) -> list[Part]:
    async def all_pieces() -> AsyncGenerator[Piece, None]:
        for piece in pieces:
            yield piece
        raise AssertionError("nothing is read behind a finish")

    given.text.tokenizer.detokenizer = Detokenizer
    stream: Any = Streamed(None, None, None, given.jobs[0])

    async def all_of() -> list[Part]:
        return [part async for part in given._parts(prompt, 5, stream, all_pieces())]

    return asyncio.run(all_of())


def test_parts_of_a_completion() -> None:
    pieces = [Piece("a", [token(65, 0)]), Piece("b", [token(66, 1)], "stop")]
    assert parts_of(completion(), *pieces) == [Part(5, "a"), Part(5, "b", "stop")]
    assert parts_of(completion(echo=True, prompts=["Hi", "Ho"]), *pieces, prompt=1) == [
        Part(5, "Hoa"), Part(5, "b", "stop"),
    ]  # fmt: skip

    def logprobs(offset: int, id: int, top: Any) -> dict[str, Any]:
        value = {"text_offset": [offset], "token_logprobs": [-id / 10], "tokens": [chr(id)]}
        return value | {"top_logprobs": top and [{chr(id + 1): -1.0}]}

    plain = [Part(5, "a", logprobs=logprobs(0, 65, True)), Part(5, "b", "stop", logprobs(1, 66, True))]
    assert parts_of(completion(logprobs=1), *pieces) == plain
    without = [Part(5, "a", logprobs=logprobs(0, 65, None)), Part(5, "b", "stop", logprobs(1, 66, None))]
    assert parts_of(completion(logprobs=0), *pieces) == without
    first = {
        "text_offset": [0, 1, 2], "token_logprobs": [None, -0.5, -6.5], "tokens": ["H", "i", "A"],
        "top_logprobs": [None, {}, {"B": -1.0}],
    }  # fmt: skip
    echoed = parts_of(completion(logprobs=1, echo=True), *pieces)
    assert echoed == [Part(5, "Hia", logprobs=first), Part(5, "b", "stop", logprobs(3, 66, True))]


def test_a_completion_without_tokens_is_its_prompt() -> None:
    silent = completion(max_tokens=0, echo=True, logprobs=0)
    assert silent.silent
    assert not completion(max_tokens=1).silent
    assert not completion().silent
    silent.usage.completion = 1
    (part,) = parts_of(silent, Piece("a", [token(65)], "stop"))
    logprobs = {"text_offset": [0, 1], "token_logprobs": [None, -0.5], "tokens": ["H", "i"], "top_logprobs": None}
    assert part == Part(5, "Hi", "length", logprobs)
    assert silent.usage.completion == 0
    loud = completion(max_tokens=1)
    loud.usage.completion = 1
    parts_of(loud, Piece("a", [], "length"))
    assert loud.usage.completion == 1


def test_every_prompt_of_a_completion_has_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    turns: list[Any] = []

    def stream(*of: Any) -> Streamed:
        made.append(of)
        return Streamed(*of)

    class Turns(streams.Turns):
        def pieces(self, stream: Any, prompt: int, choice: int, ticket: Any) -> AsyncGenerator[Piece, None]:
            turns.append((prompt, choice))
            return super().pieces(stream, prompt, choice, ticket)

    monkeypatch.setattr(openai_completions, "Stream", stream)
    monkeypatch.setattr(openai_completions, "Turns", Turns)
    given: Any = completion(jobs=2, prompts=["", ""], n=3)
    admitted: list[tuple[int, int]] = []

    def admit(tokens: int, sequences: int) -> Any:
        admitted.append((tokens, sequences))
        return nullcontext(SimpleNamespace(places=2, name="t"))

    given.front.admit = admit

    async def all_of() -> list[Part]:
        return [part async for part in Completion.parts(given)]

    parts = sorted(asyncio.run(all_of()), key=lambda part: part.index)
    assert parts == [Part(prompt * 3 + n, f"{7 + n}t", "stop") for prompt in (0, 1) for n in range(3)]
    assert admitted == [(4, 6)]
    assert turns == [(prompt, n) for prompt in (0, 1) for n in range(3)]
    assert [of[:3] + of[4:] for of in made] == [(given.front, given.text, given.ready, given.usage)] * 6


def test_kinds_of_blocks_that_go_on() -> None:
    kinds: list[Any] = ["reasoning", "content", "call", "arguments"]
    for kind, wanted in (("reasoning", "reasoning"), ("content", "content"), ("call", "arguments")):
        assert [k for k in kinds if blocks._goes_on(Block(kind, 0), Delta(0, k))] == [wanted]
