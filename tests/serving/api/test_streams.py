"""The text of sequences while their rows come, the answers of several sources together, and server-sent events."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from serving.api import sse
from serving.api.errors import ApiError
from serving.api.front import Job
from serving.api.sse import ClientGone, EventStream, Json, event, while_connected
from serving.api.streams import UNREAD, Piece, Stream, Token, Turns, Usage, together
from serving.ranks.messages import Row, Sampling, TokenLogprob
from umbra.errors import UserError

END = 36  # "$", an end-of-sequence token


class Detokenizer:
    """A token is the character of its number; one of "@" shows when the next one comes."""

    def __init__(self, prompt: Sequence[int]):
        self.prompt, self.held = prompt, ""

    def push(self, tokens: tuple[int, ...]) -> str:
        (token,) = tokens
        text, self.held = self.held + chr(token), ""
        if token == ord("@"):
            text, self.held = text[:-1], "@"
        return text

    def rest(self) -> str:
        return self.held


class Timeline:
    """Keeps the rows that it is told of."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.left = False

    async def __aenter__(self) -> "Timeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.left = True

    def row(self, row: Row) -> None:
        self.rows.append(row)


LOGPROB = TokenLogprob(-1.0, [])


def row(text: str, finish: str = "", found: int = 0, logprobs: bool = False, **more: Any) -> Row:
    return Row(1, [ord(c) for c in text], finish, found, [LOGPROB] * len(text) if logprobs else [], **more)


def stream_of(*rows: Row, **settings: Any) -> tuple[Stream, Timeline, list[Any]]:
    """-> a stream of these rows, its times, and what is asked of the front"""
    asked: list[Any] = []
    timeline = Timeline()

    async def source(job: Job, ticket: Any) -> AsyncGenerator[Row, None]:
        asked.append((job, ticket))
        try:
            for found in rows:
                yield found
        finally:
            asked.append("closed")

    def arrived(tokens: int) -> Timeline:
        asked.append(tokens)
        return timeline

    front: Any = SimpleNamespace(metrics=SimpleNamespace(arrived=arrived), rows=source)
    text: Any = SimpleNamespace(tokenizer=SimpleNamespace(detokenizer=Detokenizer))
    ready: Any = SimpleNamespace(stop_ids=[END])
    stops = settings.pop("stops", ())
    job = Job([1, 2, 3], Sampling(99, **settings), stops)
    return Stream(front, text, ready, job, Usage(3)), timeline, asked


def pieces_of(stream: Stream, ticket: Any = None) -> list[Piece]:
    async def all_of() -> list[Piece]:
        return [piece async for piece in stream.pieces(ticket)]

    return asyncio.run(all_of())


def test_pieces_are_rows_as_text() -> None:
    stream, timeline, asked = stream_of(row("a", found=2), row("bc"), row("d$", "stop"), row("never"))
    assert pieces_of(stream, "ticket") == [Piece("a", []), Piece("bc", []), Piece("d", [], "stop")]
    assert stream.usage == Usage(3, 2, 5)  # the end counts
    assert [timed.tokens for timed in timeline.rows] == [[97], [98, 99], [100, END]]
    assert timeline.left
    assert asked == [3, (stream.job, "ticket"), "closed"]
    assert stream.prompt_logprobs == []


def test_a_token_that_ends_is_text_unless_it_ends() -> None:
    """Only the last one of a row that has stopped ends; those that a request gives do as well."""
    stream, _, _ = stream_of(row("$"), row("$$", "stop"))
    assert pieces_of(stream) == [Piece("$", []), Piece("$", [], "stop")]
    stream, _, _ = stream_of(row("a$", "length"))
    assert pieces_of(stream) == [Piece("a$", [], "length")]
    stream, _, _ = stream_of(row("a$", "stop"), ignore_eos=True)
    assert pieces_of(stream) == [Piece("a$", [], "stop")]
    stream, _, _ = stream_of(row("ab", "stop"), stop_token_ids=(98,), ignore_eos=True)
    assert pieces_of(stream) == [Piece("a", [], "stop")]
    stream, _, _ = stream_of(row("ab", "stop"), stop_token_ids=(98,))
    assert pieces_of(stream) == [Piece("a", [], "stop")]


def test_what_is_held_back_comes_at_the_end() -> None:
    stream, _, _ = stream_of(row("a"), row("@"), row("E"), row("N", "length"), stops=("END",))
    assert pieces_of(stream) == [Piece("a", []), Piece("@", []), Piece("EN", [], "length")]
    stream, _, _ = stream_of(row("a@", "length"))
    assert pieces_of(stream) == [Piece("a@", [], "length")]
    stream, _, _ = stream_of(row("E@$", "stop"), stops=("END",))
    assert pieces_of(stream) == [Piece("E@", [], "stop")]


def test_a_stop_string_ends_a_stream() -> None:
    """Tokens behind it are no part of the answer: they neither count nor are told to metrics."""
    stream, timeline, asked = stream_of(row("aE"), row("NDxy"), row("never"), stops=("END",))
    assert pieces_of(stream) == [Piece("a", []), Piece("", [], "stop", "END")]
    assert stream.usage.completion == 4
    assert [(timed.tokens, timed.finish) for timed in timeline.rows] == [([97, 69], ""), ([78, 68], "stop")]
    assert asked[-1] == "closed"
    stream, timeline, _ = stream_of(row("aEND", "length"), stops=("END",))
    assert pieces_of(stream) == [Piece("a", [], "stop", "END")]
    assert timeline.rows[0].finish == "stop"


def tokens(text: str, start: int = 0) -> list[Token]:
    return [Token(ord(c), LOGPROB, start + n) for n, c in enumerate(text)]


def test_tokens_come_with_their_text() -> None:
    """Those of text that is held back come with it; those of a stop string never."""
    prompt = [TokenLogprob(-2.0, [])]
    rows = [row("ab", logprobs=True, prompt_logprobs=prompt), row("EN", logprobs=True), row("x", logprobs=True)]
    last = row("y$", "stop", logprobs=True, prompt_logprobs=[LOGPROB])
    stream, _, _ = stream_of(*rows, last, stops=("END",), logprobs=0)
    assert pieces_of(stream) == [
        Piece("ab", tokens("ab")), Piece("ENx", tokens("ENx", 2)),
        Piece("y", [*tokens("y", 5), Token(END, LOGPROB, 6)], "stop"),
    ]  # fmt: skip
    assert stream.prompt_logprobs == prompt
    stream, _, _ = stream_of(row("ab", logprobs=True), row("ENDx", logprobs=True), stops=("END",), logprobs=0)
    assert pieces_of(stream) == [Piece("ab", tokens("ab")), Piece("", [], "stop", "END")]
    stream, _, _ = stream_of(row("@", logprobs=True), row("a", logprobs=True), row("", "length"), logprobs=0)
    both = [Token(64, LOGPROB, 0), Token(97, LOGPROB, 0)]
    assert pieces_of(stream) == [Piece("@a", both), Piece("", [], "length")]


def test_usage_in_openai_s_shape() -> None:
    assert Usage().body() == {
        "prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert Usage(7, 3, 5).body() == {
        "prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip


def run(work: Awaitable[Any]) -> Any:
    """What `work` gives; it must leave no task behind, and end in a moment."""

    async def alone() -> Any:
        found = await asyncio.wait_for(work, 5)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        return found

    return asyncio.run(alone())


class Source:
    """Yields numbers, each when its turn has come; then it ends or fails."""

    def __init__(self, *items: int, error: Exception | None = None):
        self.items, self.error, self.closed = items, error, False

    async def read(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                yield item
            if self.error:
                raise self.error
        finally:
            self.closed = True


def test_items_of_all_sources_come_until_all_have_ended() -> None:
    sources = [Source(1, 2, 3), Source(), Source(*range(10, 14 + UNREAD))]

    async def all_of() -> list[int]:
        return [item async for item in together([source.read() for source in sources])]

    found = run(all_of())
    assert sorted(found) == [1, 2, 3, *range(10, 14 + UNREAD)]
    assert [item for item in found if item < 10] == [1, 2, 3]
    assert all(source.closed for source in sources)
    alone = Source(1).read()
    assert together([alone]) is alone


def test_the_error_of_one_source_ends_all() -> None:
    sources = [Source(*range(1000)), Source(error=ApiError(500, "it broke"))]

    async def all_of() -> list[int]:
        return [item async for item in together([source.read() for source in sources])]

    with pytest.raises(ApiError, match="it broke"):
        run(all_of())
    assert all(source.closed for source in sources)


def test_sources_end_with_their_reader() -> None:
    sources = [Source(*range(1000)), Source(*range(1000))]

    async def first() -> int:
        async with aclosing(together([source.read() for source in sources])) as items:
            found = await anext(items)
        assert all(source.closed for source in sources)
        return found

    assert run(first()) == 0
    assert all(source.closed for source in sources)


class Waiting:
    """A stream whose pieces come when they are told to."""

    def __init__(self, name: str, log: list[str]):
        self.name, self.log, self.go = name, log, asyncio.Event()

    async def pieces(self, ticket: Any) -> AsyncGenerator[Piece, None]:
        assert ticket == "ticket"
        self.log.append(f"{self.name} begins")
        try:
            await self.go.wait()
            yield Piece(self.name, [])
            await asyncio.sleep(0)
            yield Piece(self.name, [], "stop")
        finally:
            self.log.append(f"{self.name} ends")


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


async def read(turns: Turns, stream: Any, prompt: int, choice: int) -> list[Piece]:
    return [piece async for piece in turns.pieces(stream, prompt, choice, "ticket")]  # type: ignore[arg-type]


def test_later_choices_of_a_prompt_wait_for_the_first() -> None:
    async def scenario() -> None:
        log: list[str] = []
        turns = Turns(9)
        streams = {name: Waiting(name, log) for name in ("a0", "a1", "a2", "b0")}
        tasks = [asyncio.create_task(read(turns, s, "ab".index(n[0]), int(n[1]))) for n, s in streams.items()]
        await settle()
        assert log == ["a0 begins", "b0 begins"]
        streams["b0"].go.set()
        await settle()
        assert log[2:] == ["b0 ends"]
        streams["a0"].go.set()
        await settle()
        assert sorted(log[3:]) == ["a0 ends", "a1 begins", "a2 begins"]
        for stream in streams.values():
            stream.go.set()
        found = await asyncio.gather(*tasks)
        assert found == [[Piece(name, []), Piece(name, [], "stop")] for name in streams]

    run(scenario())


def test_later_choices_begin_while_the_first_goes_on() -> None:
    class Long(Waiting):
        async def pieces(self, ticket: Any) -> AsyncGenerator[Piece, None]:
            yield Piece("", [])
            await self.go.wait()

    async def scenario() -> None:
        log: list[str] = []
        turns, first, other = Turns(2), Long("first", log), Waiting("other", log)
        tasks = [asyncio.create_task(read(turns, stream, 0, n)) for n, stream in enumerate((first, other))]
        await settle()
        assert log == ["other begins"]
        first.go.set()
        other.go.set()
        await asyncio.gather(*tasks)

    run(scenario())


def test_no_more_sequences_run_than_there_are_places() -> None:
    async def scenario() -> None:
        log: list[str] = []
        turns = Turns(2)
        streams = [Waiting(str(n), log) for n in range(4)]
        tasks = [asyncio.create_task(read(turns, stream, n, 0)) for n, stream in enumerate(streams)]
        await settle()
        assert log == ["0 begins", "1 begins"]
        streams[1].go.set()
        await settle()
        assert log[2:] == ["1 ends", "2 begins"]
        for stream in streams:
            stream.go.set()
        await asyncio.gather(*tasks)
        assert len(log) == 8

    run(scenario())


def test_others_go_on_when_the_first_choice_fails() -> None:
    class Failing(Waiting):
        async def pieces(self, ticket: Any) -> AsyncGenerator[Piece, None]:
            await asyncio.sleep(0)
            if ticket:
                raise ApiError(500, "it broke")
            yield Piece("", [])

    async def scenario() -> None:
        log: list[str] = []
        turns, other = Turns(1), Waiting("other", log)
        other.go.set()
        tasks = [read(turns, Failing("first", log), 0, 0), read(turns, other, 0, 1)]
        first, second = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(first, ApiError)
        assert second == [Piece("other", []), Piece("other", [], "stop")]

    run(scenario())


class Wire:
    """A client's end of a request: it goes when told to, and keeps what is sent."""

    def __init__(self) -> None:
        self.gone, self.sent = asyncio.Event(), list[Any]()
        self.first = True
        self.request = Request({"type": "http", "method": "POST", "headers": []}, self.receive)

    async def receive(self) -> Any:
        if self.first:  # what is no end
            self.first = False
            return {"type": "http.request"}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> list[bytes]:
        return [m["body"] for m in self.sent[1:]]


def test_work_ends_when_its_client_goes() -> None:
    async def scenario() -> None:
        ended: list[str] = []

        async def work(wait: bool, error: Exception | None = None) -> str:
            try:
                await asyncio.sleep(60 if wait else 0)
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                ended.append("cancelled")
                raise
            if error:
                raise error
            return "done"

        assert await while_connected(Wire().request, work(False)) == "done"
        with pytest.raises(ApiError, match="why"):
            await while_connected(Wire().request, work(False, ApiError(400, "why")))
        wire = Wire()
        asyncio.get_running_loop().call_soon(wire.gone.set)
        with pytest.raises(ClientGone):
            await while_connected(wire.request, work(True))
        assert ended == ["cancelled"]

    run(scenario())


def test_events_and_json_as_bytes() -> None:
    assert event({"a": [1, None]}) == b'data: {"a":[1,null]}\n\n'
    assert event("x", "name") == b'event: name\ndata: "x"\n\n'
    made = Json({"a": "é"}, 201)
    assert (made.body, made.status_code, made.headers["content-type"]) == (
        '{"a":"é"}'.encode(), 201, "application/json"
    )  # fmt: skip
    failed = sse.failure(ApiError(500, "why", "p", "c"))
    error = {"message": "why", "type": "server_error", "param": "p", "code": "c"}
    assert json.loads(failed.removeprefix(b"data: ")) == {"error": error}


class Events:
    """A source of events that says whether it was closed."""

    def __init__(self, *events: bytes | Exception | None):
        self.events, self.closed = events, False

    async def read(self) -> AsyncGenerator[bytes, None]:
        try:
            for item in self.events:
                if item is None:
                    await asyncio.sleep(60)
                elif isinstance(item, Exception):
                    raise item
                else:
                    await asyncio.sleep(0)
                    yield item
        finally:
            self.closed = True


def streamed(
    *events: bytes | Exception | None, does: Callable[[Wire], None] = lambda wire: None, **more: Any
) -> tuple[Wire, Events]:
    async def scenario() -> tuple[Wire, Events]:
        wire, source = Wire(), Events(*events)
        asyncio.get_running_loop().call_soon(does, wire)
        response = await EventStream.start(wire.request, source.read(), **more)
        wire.first = True
        await response({}, wire.receive, wire.send)
        return wire, source

    found: tuple[Wire, Events] = run(scenario())
    return found


def test_a_stream_of_events() -> None:
    wire, source = streamed(b"a", b"b")
    head = wire.sent[0]
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    headers = dict(head["headers"])
    assert headers == {
        b"cache-control": b"no-cache", b"x-accel-buffering": b"no",
        b"content-type": b"text/event-stream; charset=utf-8",
    }  # fmt: skip
    assert wire.sent[1:] == [
        {"type": "http.response.body", "body": body, "more_body": more}
        for body, more in ((b"a", True), (b"b", True), (b"", False))
    ]
    assert source.closed


def test_errors_in_a_stream_are_its_last_event() -> None:
    wire, source = streamed(b"a", ApiError(500, "why"), failure=lambda error: f"<{error}>".encode())
    assert wire.body == [b"a", b"<why>", b""]
    assert source.closed
    wire, _ = streamed(b"a", ApiError(500, "why"))
    assert wire.body == [b"a", sse.failure(ApiError(500, "why")), b""]
    told: list[ApiError] = []

    def failure(error: ApiError) -> bytes:
        told.append(error)
        return b"f"

    wire, _ = streamed(b"a", UserError("a file is odd"), failure=failure)
    assert wire.body == [b"a", b"f", b""]
    (error,) = told
    assert (error.status, str(error), error.param, error.code) == (500, "a file is odd", None, "internal_error")


def test_a_stream_that_fails_before_its_first_event_is_no_stream() -> None:
    async def scenario(error: type[BaseException], *events: bytes | Exception | None) -> None:
        wire, source = Wire(), Events(*events)
        if None in events:
            asyncio.get_running_loop().call_soon(wire.gone.set)
        with pytest.raises(error):
            await EventStream.start(wire.request, source.read())
        assert source.closed

    run(scenario(ApiError, ApiError(400, "why")))
    run(scenario(ClientGone, None))


def test_a_stream_without_events_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> Wire:
        wire, source = Wire(), Events()
        generator = source.read()
        first = asyncio.ensure_future(anext(generator))
        await EventStream(generator, first)({}, wire.receive, wire.send)
        return wire

    assert run(scenario()).body == [b""]


def test_a_client_that_goes_ends_its_stream() -> None:
    def leave(wire: Wire) -> None:
        asyncio.get_running_loop().call_later(0.02, wire.gone.set)

    wire, source = streamed(b"a", None, does=leave)
    assert wire.body == [b"a"]
    assert source.closed


def test_a_stream_begins_although_its_first_event_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it gets comments, so that nobody on the way closes it."""
    monkeypatch.setattr(sse, "PING_S", 0.01)

    async def scenario() -> Wire:
        wire, go = Wire(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            await go.wait()
            yield b"a"

        response = await EventStream.start(wire.request, events())
        assert not response.first.done()
        asyncio.get_running_loop().call_later(0.05, go.set)
        await response({}, wire.receive, wire.send)
        return wire

    body = run(scenario()).body
    assert body[-2:] == [b"a", b""]
    assert len(body) > 3
    assert {*body[:-2]} == {b": ping\n\n"}


def test_what_nobody_foresaw_in_a_stream_is_raised() -> None:
    with pytest.raises(ValueError, match="the cup is empty"):
        streamed(b"a", ValueError("the cup is empty"))


def test_a_client_that_goes_before_the_first_event_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.01)

    def leave(wire: Wire) -> None:
        asyncio.get_running_loop().call_later(0.03, wire.gone.set)

    async def scenario() -> Events:
        wire, source = Wire(), Events(None)
        response = await EventStream.start(wire.request, source.read())
        leave(wire)
        await response({}, wire.receive, wire.send)
        return source

    assert run(scenario()).closed


def test_a_client_that_goes_while_an_event_is_sent_closes_the_source() -> None:
    async def scenario() -> None:
        wire, source = Wire(), Events(b"a", b"b", b"c")
        response = await EventStream.start(wire.request, source.read())

        async def send(message: Any) -> None:
            if message.get("body") == b"b":
                wire.gone.set()
                await asyncio.sleep(60)

        await response({}, wire.receive, send)
        assert source.closed

    run(scenario())


def test_every_event_says_when_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = 100.0, list[float]()

    async def scenario() -> None:
        nonlocal now
        wire, source = Wire(), Events(b"a", b"b")
        response = await EventStream.start(wire.request, source.read())
        monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=lambda: now))

        async def send(message: Any) -> None:
            nonlocal now
            seen.append(response.sent_at)
            now += 1

        await response({}, wire.receive, send)

    run(scenario())
    assert seen == [100.0, 101.0, 102.0, 103.0]


def test_comments_come_as_long_after_the_last_event_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept, sent = 100.0, list[float](), list[bytes]()
    stream: Any = SimpleNamespace(sent_at=100.0)

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        if len(slept) > 4:
            raise asyncio.CancelledError
        now += seconds
        if len(slept) == 1:
            stream.sent_at = 110.0  # an event came meanwhile
        if len(slept) == 3:
            now += 20.0

    async def body(data: bytes) -> None:
        sent.append(data)
        stream.sent_at = now

    monkeypatch.setattr(sse, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=lambda: now))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(EventStream._pings(stream, body))
    assert slept == [15.0, 10.0, 15.0, 15.0, 15.0]
    assert sent == [sse.PING] * 3
    assert math.isclose(now, 175.0)
