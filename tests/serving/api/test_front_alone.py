"""The front without connections or ranks: its state, threads, turns and rows; keys, errors, bodies, descriptions."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request

from executor.config.load import load_case
from serving.api import anthropic, app, auth, body, errors, front, openapi
from serving.api.auth import Keys, check_address, check_origin, is_loopback
from serving.api.body import decoded, read_body
from serving.api.errors import ApiError, renamed
from serving.api.front import Front, Job, Text
from serving.api.sse import ClientGone, Json
from serving.ranks.client import EngineClient, EngineGone, RequestRefused
from serving.ranks.messages import Progress, Ready, Row, Running, Sampling, State
from tests.serving.api.front import family_tokenizer
from text.formats import FORMATS, TAGS
from umbra.errors import UserError

READY = Ready(416, 4, 96, 16, 50, 2, [0], 100.0)


def state(*running: int, rate: float = 0.0) -> State:
    return State(1, 0, [Running(id, 1, 1, 0, 9, 0) for id in running], [], 0, prefill_rate=rate)


class Alone(Front):
    """A front whose ranks take requests, until they are told not to."""

    def __init__(self, **settings: Any) -> None:
        case = load_case("demo", settings={f"serve_config.{key}": value for key, value in settings.items()})
        super().__init__(case, Keys(), EngineClient(Path("/nowhere")))
        self.client.ready, self.client.alive = READY, True
        self.client.heard_at = float("inf")
        self.closed: list[str] = []
        self.text: Any = SimpleNamespace(close=lambda: self.closed.append("text"))
        self.rounds: list[list[Row | Exception | float]] = []  # what comes of each time a request is submitted
        self.asked: list[Any] = []
        self.ended = 0
        self.client.rows = self.given  # type: ignore[method-assign, assignment]

    async def given(self, *of: Any) -> AsyncGenerator[Row, None]:
        self.asked.append(of)
        try:
            for item in self.rounds.pop(0):
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, float):
                    await asyncio.sleep(item)
                else:
                    yield item
        finally:
            self.ended += 1


def supervisor(failed: str = "", stopping: bool = False) -> Any:
    return SimpleNamespace(failed=failed, stopping=stopping)


def refused(call: Any, *of: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        call(*of)
    return raised.value


def test_the_state_of_a_server() -> None:
    of = Alone()
    assert (of.name, of.open, of.draining, of.unknown) == ("demo", 0, False, {})
    assert (of.state, of.status) == ("serving", {"status": "serving"})
    assert of.check_serving() == (READY, of.text)
    of.client.heard_at = 0.0
    assert (of.state, of.status) == ("silent", {"status": "silent"})
    assert of.check_serving() == (READY, of.text)
    of.client.progress = Progress("loading weights", 0.25)
    for part in ("ready", "text"):
        of = Alone()
        of.client.progress = Progress("loading weights", 0.25)
        if part == "ready":
            of.client.ready, of.client.reason = None, "it broke"
        else:
            of.text = None
        reason = "it broke" if part == "ready" else None
        loading = {"status": "loading", "stage": "loading weights", "progress": 0.25, "reason": reason}
        assert of.status == loading
        error = refused(of.check_serving)
        assert str(error) == "the model is loading: loading weights (25%)"
        assert (error.status, error.code, error.retry_s) == (503, "loading", 5)
        of.supervisor = supervisor()
        assert of.state == "loading"
    of.client.ready = None
    of.supervisor = supervisor("a rank died")
    assert of.status == {"status": "failed", "reason": "a rank died"}
    error = refused(of.check_serving)
    assert (str(error), error.code) == ("the ranks have ended: a rank died", "engine_gone")
    of.draining = True
    assert of.status == {"status": "draining"}
    error = refused(of.check_serving)
    assert (str(error), error.code, error.retry_s) == ("the server is about to end", "draining", 1)


def test_names_of_the_model() -> None:
    of = Alone(served_model_name="gpt")
    assert of.name == "gpt"
    for good in (None, "", "gpt", "demo"):
        of.check_model(good)
    error = refused(of.check_model, "x" * 100)
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert str(error) == f"there is no model {'x' * 80}: this server has gpt"


def test_work_is_done_in_few_threads_and_not_without_end() -> None:
    of = Alone()

    async def scenario() -> None:
        go = threading.Event()
        names: list[str] = []

        def work() -> int:
            go.wait(5)
            names.append(threading.current_thread().name)
            return 7

        tasks = [asyncio.create_task(of.work(work)) for _ in range(64)]
        await asyncio.sleep(0)
        assert of._busy == 64
        with pytest.raises(ApiError) as raised:
            await of.work(work)
        error = raised.value
        assert (error.status, error.code, error.retry_s) == (429, "queue_full", 1)
        go.set()
        assert await asyncio.gather(*tasks) == [7] * 64
        assert {name.rpartition("_")[0] for name in names} == {"front"}
        assert len({*names}) <= 2
        assert of._busy == 0

        def fails() -> None:
            raise ValueError("odd")

        with pytest.raises(ValueError, match="odd"):
            await of.work(fails)
        assert of._busy == 0

    asyncio.run(scenario())
    of.close()
    assert of.closed == ["text"]
    with pytest.raises(RuntimeError):
        asyncio.run(of.work(lambda: 1))
    assert of._busy == 0
    of.text = None
    of.close()


def test_large_requests_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "MOST_JOBS", 3)
    of = Alone()

    async def scenario() -> None:
        running, most, done = 0, 0, 0

        async def read() -> None:
            nonlocal running, most, done
            async with of.turn():
                running += 1
                most = max(most, running)
                await asyncio.sleep(0)
                running -= 1
            done += 1

        tasks = [asyncio.create_task(read()) for _ in range(4)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert (most, done, of._in_line) == (1, 3, 0)
        assert [type(error) for error in found] == [type(None)] * 3 + [ApiError]
        await read()
        assert done == 4

    asyncio.run(scenario())


def test_requests_are_admitted_by_the_latest_speed() -> None:
    of = Alone()
    asked: list[Any] = []

    def admit(*given: Any) -> str:
        asked.append(given)
        return "ticket"

    of.limits.admit = admit  # type: ignore[method-assign, assignment]
    assert of.admit(5, 2) == "ticket"  # type: ignore[comparison-overlap]
    of.client.state = state()
    of.admit(5, 2)
    of.client.state = state(rate=30.0)
    of.admit(5, 2)
    assert asked == [(5, 2, READY, 100.0), (5, 2, READY, 100.0), (5, 2, READY, 30.0)]


JOB = Job([1, 2, 3], Sampling(4), priority=5, salt=b"s")
ROWS = [Row(1, [7]), Row(1, [8], "stop")]


def rows_of(of: Alone) -> tuple[list[Row], list[int]]:
    """-> the rows of a request, and of how many tokens its ticket was told"""
    started: list[int] = []
    ticket: Any = SimpleNamespace(started=started.append)
    found: list[Row] = []

    async def all_of() -> None:
        async for row in of.rows(JOB, ticket):
            found.append(row)

    try:
        asyncio.run(all_of())
    except ApiError as error:
        error.add_note(str((found, started)))
        raise
    return found, started


def test_rows_of_a_request() -> None:
    of = Alone()
    of.rounds = [[*ROWS]]
    assert rows_of(of) == (ROWS, [3])
    assert of.asked == [([1, 2, 3], Sampling(4), 5, b"s", 0)]
    assert of.ended == 1


@pytest.mark.parametrize(
    ("items", "status", "code", "text"),
    [
        ([RequestRefused("too long")], 400, None, "too long"),
        ([EngineGone("it died")], 503, "engine_gone", "it died"),
        ([ROWS[0], EngineGone("it died")], 500, "engine_gone", "it died"),
    ],
)
def test_requests_that_fail(items: list[Any], status: int, code: str | None, text: str) -> None:
    of = Alone()
    of.rounds = [items]
    with pytest.raises(ApiError) as raised:
        rows_of(of)
    assert (raised.value.status, raised.value.code, str(raised.value)) == (status, code, text)
    rows = len(items) - 1
    assert raised.value.__notes__ == [str((ROWS[:rows], [3] * rows))]


def test_a_request_without_a_row_is_submitted_to_ranks_that_are_back() -> None:
    of = Alone()
    of.supervisor = supervisor()
    of.rounds = [[EngineGone("it died")], [*ROWS]]
    assert rows_of(of) == (ROWS, [3])
    assert [asked[-1] for asked in of.asked] == [0, 1]
    of.rounds = [[ROWS[0], EngineGone("it died")], [*ROWS]]
    with pytest.raises(ApiError):
        rows_of(of)
    assert len(of.rounds) == 1


@pytest.mark.parametrize("runs", [False, True])
def test_a_request_may_wait_but_not_for_long(runs: bool) -> None:
    """Unless it runs and its prompt takes long."""
    of: Any = Alone()
    of.case = SimpleNamespace(serve_config=SimpleNamespace(queue_timeout_s=0.01))
    of.client.state = state(0, 9) if runs else state(1, 9)
    of.rounds = [[0.05, *ROWS]]
    if runs:
        assert rows_of(of)[0] == ROWS
        assert of.limits.refused["timeout"] == 0
        return
    with pytest.raises(ApiError, match=r"the request has waited for 0.01 s") as raised:
        rows_of(of)
    error = raised.value
    assert (error.status, error.code, error.retry_s, of.limits.refused["timeout"]) == (503, "queue_timeout", 5, 1)
    assert of.ended == 1
    of.client.state = None
    of.rounds = [[0.05, *ROWS]]
    with pytest.raises(ApiError):
        rows_of(of)


def test_ranks_are_waited_for_while_somebody_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    of = Alone(queue_timeout_s=2)

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now >= back:
            of.client.ready = READY

    monkeypatch.setattr(front, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(front, "time", SimpleNamespace(monotonic=lambda: now))
    for given, back, found in (
        (None, 100.0, False), (supervisor("it died"), 100.0, False), (supervisor(stopping=True), 100.0, False),
        (supervisor(), 101.0, True), (supervisor(), 102.5, True), (supervisor(), 103.0, False),
    ):  # fmt: skip
        now, of.client.ready, of.supervisor = 100.0, None, given
        assert asyncio.run(of._back()) is found, (given, back)


def test_messages_reach_metrics_and_the_page() -> None:
    of = Alone()
    told: list[Any] = []
    of.metrics.take = lambda message: told.append(("metrics", message))  # type: ignore[method-assign]
    of.live.take = lambda message: told.append(("live", message))  # type: ignore[method-assign]
    of.take(READY)
    assert told == [("metrics", READY), ("live", READY)]


STATUSES = [
    (400, "invalid_request_error"), (401, "authentication_error"), (402, "invalid_request_error"),
    (403, "permission_error"), (404, "not_found_error"), (405, "invalid_request_error"),
    (429, "rate_limit_error"), (430, "invalid_request_error"), (499, "invalid_request_error"), (500, "server_error"),
    (503, "server_error"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "kind"), STATUSES)
def test_errors_in_openai_s_shape(status: int, kind: str) -> None:
    error = ApiError(status, "a\nb", "p", "c", 3)
    assert json.loads(error.body()) == {"error": {"message": "a b", "type": kind, "param": "p", "code": "c"}}
    assert error.headers == {"Retry-After": "3"}
    plain = ApiError(status, "why")
    assert (plain.param, plain.code, plain.retry_s, plain.headers) == (None, None, 0, {})
    later = errors.unavailable("why", "c")
    assert (later.status, later.param, later.code, later.retry_s) == (503, None, "c", 1)


@pytest.mark.parametrize(
    ("text", "param", "message"),
    [
        ("Expected `int`, got `str` - at `$.n`", "n", "n: Expected int, got str"),
        ("Expected `str` - at `$.a.b[3].c`", "a.b[3].c", "a.b[3].c: Expected str"),
        ("Expected `int` - at `key in $.logit_bias`", "logit_bias", "logit_bias: Expected int"),
        ("Object missing required field `x`", None, "the request's body: Object missing required field `x`"),
        ("Expected `object` - at `$`", None, "the request's body: Expected `object` - at `$`"),
    ],
)
def test_fields_of_wrong_types_are_named(text: str, param: str | None, message: str) -> None:
    error = errors.of_validation(msgspec.ValidationError(text))
    assert (error.status, error.param, str(error)) == (400, param, message)


def test_errors_of_translated_requests_have_its_own_names() -> None:
    names = {"messages": "input", "messages[0]": "instructions", "stop": "stop_sequences", "a.b": "c"}
    for param, text, own, said in (
        ("stop", "stop: is odd", "stop_sequences", "stop_sequences: is odd"),
        ("messages[0].a[1]", "messages[0].a[1]: x", "instructions.a[1]", "instructions.a[1]: x"),
        ("messages[1].role", "another text", "input[1].role", "another text"),
        ("stopped", "stopped: x", "stopped", "stopped: x"), ("axb", "axb: x", "axb", "axb: x"),
        ("a.b", "a.b: x", "c", "c: x"), ("x.stop", "x.stop: y", "x.stop", "x.stop: y"),
    ):  # fmt: skip
        error = renamed(ApiError(418, text, param, "code", 4), names)
        assert (error.param, str(error)) == (own, said)
        assert (error.status, error.code, error.retry_s) == (418, "code", 4)
    none = ApiError(500, "why")
    assert renamed(none, names) is none


def request_of(*messages: dict[str, Any], **headers: str) -> Request:
    given = iter(messages)

    async def receive() -> Any:
        return next(given)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


def part(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


def test_bodies_are_read_up_to_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "LARGEST_BODY", 6)
    assert asyncio.run(read_body(request_of(part(b"ab", True), part(b"cd")))) == b"abcd"
    assert asyncio.run(read_body(request_of({"type": "http.request"}))) == b""
    assert asyncio.run(read_body(request_of(part(b"abcdef"), content_length="6"))) == b"abcdef"
    for request in (request_of(part(b"abc", True), part(b"defg")), request_of(part(b""), content_length="7")):
        with pytest.raises(ApiError, match="the request's body is larger than 0 MB") as raised:
            asyncio.run(read_body(request))
        assert raised.value.status == 413
    with pytest.raises(ClientGone):
        asyncio.run(read_body(request_of(part(b"a", True), {"type": "http.disconnect"})))
    monkeypatch.undo()
    assert str(body._too_large()) == "the request's body is larger than 8 MB"


def test_bodies_must_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.01)

    async def receive() -> Any:
        await asyncio.sleep(60)

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(ApiError, match=r"the body did not come within 0.01 s") as raised:
        asyncio.run(read_body(request))
    assert raised.value.status == 408


def test_bodies_are_json() -> None:
    assert decoded(b'{"a": [1]}') == {"a": [1]}
    for wrong, said in (
        (b"{", "the request's body is no JSON: "), (b'"\xff"', "the request's body is no JSON: "),
        (b"[" * 65 + b"]" * 65, "the request's body is nested more than 64 levels deep"),
        (b"[" * 10**5, "the request's body is nested too deeply"),
    ):  # fmt: skip
        error = refused(decoded, wrong)
        assert error.status == 400
        assert str(error).startswith(said)


def test_keys_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    assert Keys.read("") == Keys() == Keys(())
    file.write_bytes(b" first \n\n\tsecond\r\n")
    keys = Keys.read(str(file))
    assert keys == Keys.of([b"first", b"second"])
    assert [len(digest) for digest in keys.digests] == [32, 32]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Keys.read("~/keys") == keys
    with pytest.raises(UserError, match="cannot be read: No such file"):
        Keys.read(str(tmp_path / "nothing"))
    file.write_bytes(b" \n")
    with pytest.raises(UserError, match="has no key: write one a line"):
        Keys.read(str(file))
    assert auth.LARGEST == 1024**2
    monkeypatch.setattr(auth, "LARGEST", 4)
    file.write_bytes(b"abcd")
    assert Keys.read(str(file)) == Keys.of([b"abcd"])
    file.write_bytes(b"abcde")
    with pytest.raises(UserError, match="is larger than 0 MB"):
        Keys.read(str(file))


def test_keys_of_requests() -> None:
    keys = Keys.of([b"first", b"second"])
    assert Keys().check(Headers({})) == b""
    first = keys.check(Headers({"authorization": "Bearer first"}))
    assert first == keys.digests[0][:16]
    for good in (
        {"authorization": "bearer  first "}, {"x-api-key": "first"}, {"authorization": "Basic x", "x-api-key": "first"},
    ):  # fmt: skip
        assert keys.check(Headers(good)) == first
    assert keys.check(Headers({"x-api-key": "second"})) == keys.digests[1][:16]
    for wrong in (
        {}, {"authorization": "first"}, {"authorization": "Bearer third"}, {"x-api-key": " first"},
        {"authorization": "Bearer x", "x-api-key": "first"},
    ):  # fmt: skip
        error = refused(keys.check, Headers(wrong))
        assert (error.status, error.code, error.param) == (401, "invalid_api_key", None)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True),
        ("0.0.0.0", False), ("10.0.0.1", False), ("example.com", False), ("", False), ("::", False),
    ],
)  # fmt: skip
def test_only_this_machine_needs_no_key(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    check_address(host, Keys.of([b"a"]))
    if loopback:
        check_address(host, Keys())
    else:
        with pytest.raises(UserError, match="everybody who reaches this address could use the server"):
            check_address(host, Keys())


@pytest.mark.parametrize(
    ("headers", "host", "code"),
    [
        ({}, "a", None), ({"host": "a"}, "a", None), ({"host": "a:80"}, "a", None),
        ({"host": "10.0.0.1:80"}, "a", None), ({"host": "[::1]:80"}, "a", None),
        ({"host": "[::1]"}, "a", None), ({"host": "localhost:1"}, "a", None),
        ({"host": "b"}, "a", "wrong_host"), ({"host": "b:80"}, "a", "wrong_host"), ({"host": "a:x"}, "a", "wrong_host"),
        ({"host": "a:80", "origin": "http://a:80"}, "a", None), ({"host": "a", "origin": "https://a"}, "a", None),
        ({"host": "a:80", "origin": "http://a"}, "a", "cross_origin"),
        ({"host": "a", "origin": "null"}, "a", "cross_origin"),
        ({"host": "a", "origin": "http://b"}, "a", "cross_origin"),
    ],
)  # fmt: skip
def test_pages_of_other_sites_are_told_by_their_headers(headers: dict[str, str], host: str, code: str | None) -> None:
    if code is None:
        check_origin(Headers(headers), host, Keys())
        return
    error = refused(check_origin, Headers(headers), host, Keys())
    assert (error.status, error.code) == (403, code)
    keys = Keys.of([b"a"])
    if code == "wrong_host":
        check_origin(Headers(headers), host, keys)  # a foreign page does not know the key
    else:
        assert refused(check_origin, Headers(headers), host, keys).code == code


def test_the_api_is_described() -> None:
    found = openapi.document([(method, path) for method, path, _ in app.ROUTES])
    assert (found["openapi"], found["info"]["title"]) == ("3.1.0", "Umbra")
    paths = found["paths"]
    assert paths["/v1/models/{name}"]["get"]["parameters"] == [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    statuses = ["400", "401", "403", "404", "405", "408", "413", "429", "500", "503"]
    examples: dict[str, list[Any]] = {}
    for path, methods in paths.items():
        for operation in methods.values():
            assert [*operation["responses"]] == ["200", *statuses]
            good, *bad = operation["responses"].values()
            json_answer = {"schema": {"type": "object"}}
            stream = "stream" in getattr(openapi.BODIES.get(path), "__struct_fields__", ())
            answer = {"application/json": json_answer} | ({"text/event-stream": {}} if stream else {})
            assert good == {"description": "the answer", "content": answer}
            shape = "MessagesError" if path.startswith("/v1/messages") else "Error"
            refusal = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
            content = answer if path == "/health/ready" else refusal
            assert bad == [{"description": "an error", "content": content}] * len(statuses)
            assert ("requestBody" in operation) == (path in openapi.BODIES)
            assert ("parameters" in operation) == (path == "/v1/models/{name}")
            if "requestBody" in operation:
                request = operation["requestBody"]
                assert request["required"] is True
                described = request["content"]["application/json"]
                assert described["schema"] == {"$ref": f"#/components/schemas/{openapi.BODIES[path].__name__}"}
                assert [*described["examples"]] == [str(n) for n in range(len(described["examples"]))]
                examples[path] = [example["value"] for example in described["examples"].values()]
    assert {*found["components"]["schemas"]} >= {"ChatRequest", "Error", "MessagesError", "MessagesRequest"}
    for path, given in examples.items():
        for example in given:
            msgspec.convert(example, openapi.BODIES[path])
    streamed = [path for path, given in examples.items() if any(example.get("stream") for example in given)]
    assert streamed == ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
    lengths = {v for given in examples.values() for e in given for k, v in e.items() if k.startswith("max_")}
    assert lengths == {8}


def test_ids_of_requests() -> None:
    for good in ("a", "x" * 128, "a b"):
        assert app.request_id(Headers({"x-request-id": good})) == good
    for wrong in ("", "x" * 129, "é", "a\x01b"):
        made = app.request_id(Headers(raw=[(b"x-request-id", wrong.encode("latin-1"))]))
        assert made.startswith("req_")
        assert len(made) == 28


def test_fields_that_nobody_knows_are_counted() -> None:
    of: Any = Alone()
    kind = anthropic.CountRequest
    app.count_unknown(of, kind, {"messages": 1, "a": 1, "b" * 70: 2, "known": 3}, {"known"})
    app.count_unknown(of, kind, {"a": 1}, ())
    app.count_unknown(of, kind, ["c"], ())
    assert of.unknown == {"a": 2, "b" * 64: 1}
    app.count_unknown(of, kind, {f"f{n}": 1 for n in range(20)}, ())
    assert [name for name in of.unknown if name.startswith("f")] == [f"f{n}" for n in range(16)]
    for n in range(300):
        app.count_unknown(of, kind, {f"g{n}": 1}, ())
    assert len(of.unknown) == 256
    app.count_unknown(of, kind, {"a": 1, "new": 1}, ())
    assert of.unknown["a"] == 3
    assert "new" not in of.unknown


@pytest.mark.parametrize(
    ("path", "anthropics"),
    [("/v1/messages", True), ("/v1/messages/x", True), ("/v1/messagesx", False), ("/v1/chat/completions", False)],
)
def test_errors_are_in_the_shape_of_their_path(path: str, anthropics: bool) -> None:
    error = ApiError(429, "why", retry_s=3)
    response = app.error_response(error, path, {"A": "b"})
    assert json.loads(bytes(response.body)) == (anthropic.envelope(error) if anthropics else error.envelope())
    assert response.status_code == 429
    assert (response.headers["retry-after"], response.headers["a"]) == ("3", "b")
    for status in (400, 401, 402, 403, 404, 408, 413, 429, 500):
        closes = app.error_response(ApiError(status, "why"), path).headers.get("connection") == "close"
        assert closes == (status in (401, 403, 408, 413))


def test_answers_of_routes_that_need_no_model() -> None:
    of: Any = Alone(served_model_name="gpt")
    of.created = 5
    card = {"id": "gpt", "object": "model", "created": 5, "owned_by": "umbra"}
    asked: Any = SimpleNamespace(path_params={"name": "demo"})
    whole = {**card, "max_model_len": 416}

    def answer(call: Any) -> Any:
        return asyncio.run(call(of, asked))

    assert json.loads(answer(app.health).body) == {"status": "alive"}
    assert json.loads(answer(app.models).body) == {"object": "list", "data": [whole]}
    assert json.loads(answer(app.model).body) == whole
    good = answer(app.ready)
    assert (good.status_code, json.loads(good.body), good.headers.get("retry-after")) == (
        200,
        {"status": "serving"},
        None,
    )
    of.draining = True
    bad = answer(app.ready)
    assert (bad.status_code, json.loads(bad.body), bad.headers["retry-after"]) == (503, {"status": "draining"}, "1")
    of.client.ready = None
    assert json.loads(answer(app.model).body) == {**card, "max_model_len": of.case.max_sequence_length}
    asked.path_params["name"] = "other"
    with pytest.raises(ApiError, match="there is no model other"):
        answer(app.model)


def test_what_a_front_knows_of_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars and the process that tries them are made once, when they are asked for."""
    case = load_case("demo")
    of = Alone()
    read: list[Any] = []
    monkeypatch.setattr(front, "load_model_config", lambda given: SimpleNamespace(vocab_size=96))
    monkeypatch.setattr(front, "model_folder", lambda given: "folder")

    def tokenizer(*given: Any) -> Any:
        read.append(given)
        return family_tokenizer("qwen3")

    monkeypatch.setattr(front, "Tokenizer", tokenizer)
    of.load_text()
    text = of.text
    assert isinstance(text, Text)
    assert read == [("folder", 96)]
    assert text.tokenizer is family_tokenizer("qwen3")
    assert text.format is FORMATS["qwen3"]
    assert text.splits is (case.model_config.reasoning == "split")
    other: Any = SimpleNamespace(model_config=SimpleNamespace(output_format="minimax_m2", reasoning="keep"))
    assert (Text(other, text.tokenizer).splits, Text(other, text.tokenizer).format) == (False, FORMATS["minimax_m2"])
    other.model_config.reasoning = "split"
    assert Text(other, text.tokenizer).splits is True
    assert text.tokenizer.longest_token == max(len(token) for token in text.tokenizer.backend.get_vocab()) > 1
    made: list[Any] = []

    class Compiler:
        def __init__(self, *given: Any):
            made.append(given)
            self.closed = False

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(front, "Compiler", Compiler)
    text.close()
    first: Any = text.compiler(READY)
    assert id(text.compiler(READY)) == id(first)
    assert made == [(text.tokenizer, READY)]
    text.close()
    assert first.closed


def test_marks_and_bytes_of_tokens() -> None:
    """Marks that are special tokens are known by their ids; the others are text."""
    tokenizer = family_tokenizer("qwen3")
    text = Text(load_case("demo"), tokenizer)
    size, end = tokenizer.backend.get_vocab_size(), tokenizer.hf.eos_token_id
    ready = Ready(416, 4, size, 16, 50, 1, [end], 100.0)
    grammars = text.grammars(ready)
    assert text.grammars(ready) is grammars
    ids = {mark: tokenizer.backend.token_to_id(mark) for mark in TAGS}
    assert text.mark_ids(ready) == {
        mark: id for mark, id in ids.items() if id is not None and grammars.tokens.is_special_token(id)
    }
    (id,) = tokenizer.encode("A", chat=False)
    assert text.token_bytes(id, ready) == b"A"
    special = SimpleNamespace(is_special_token=lambda id: id != 5)
    backend = SimpleNamespace(token_to_id={"<think>": 3, "</think>": 5}.get)
    made: Any = Text.__new__(Text)
    made.grammars, made.tokenizer = lambda ready: SimpleNamespace(tokens=special), SimpleNamespace(backend=backend)
    assert made.mark_ids(ready) == {"<think>": 3}


def test_a_front_that_closes_leaves_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Alone()
    asked: list[Any] = []
    of._threads = SimpleNamespace(shutdown=lambda **how: asked.append(how))  # type: ignore[assignment]
    of.close()
    assert asked == [{"wait": False, "cancel_futures": True}]
    assert of.live.client is of.client
    assert of.live.metrics is of.metrics
    assert of.live.status() == {"model": "demo", "status": "serving"}
    assert isinstance(of.created, int)
    assert of.created > 1_600_000_000


class Answers:
    """An application around a router that is made up; `ask` gives what it sends."""

    def __init__(self, does: Any, **settings: Any):
        self.front = Alone(**settings)
        self.app = app.App(self.front)
        self.app.router = self.route  # type: ignore[assignment]
        self.does, self.seen = does, list[Any]()

    async def route(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append((scope["app"], scope.get("state"), self.front.open))
        await self.does(scope, receive, send)

    def ask(self, method: str = "POST", path: str = "/v1/x", kind: str = "http", **headers: str) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": kind, "method": method, "path": path, "headers": raw}
        asyncio.run(self.app(scope, receive, send))
        return sent


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await Json({"a": 1}, 201)(scope, receive, send)


def headers_of(sent: list[Any]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_every_answer_has_the_request_s_id() -> None:
    answers = Answers(fine)
    sent = answers.ask(x_request_id="mine")
    assert (sent[0]["status"], sent[1]["body"]) == (201, b'{"a":1}')
    headers = headers_of(sent)
    assert headers["x-request-id"] == "mine"
    assert "connection" not in headers
    assert headers_of(answers.ask())["x-request-id"].startswith("req_")
    assert answers.ask(kind="lifespan") == []
    assert answers.seen == [(answers.app, {"salt": b""}, 1)] * 2
    answers.seen.clear()
    for method, path, salt in (("GET", "/health", None), ("HEAD", "/v1/x", {"salt": b""})):
        answers.ask(method, path)
        assert answers.seen.pop() == (answers.app, salt, 0)
    assert answers.front.open == 0


def test_a_server_that_drains_takes_nothing_new() -> None:
    answers = Answers(fine)
    answers.front.draining = True
    sent = answers.ask()
    assert (sent[0]["status"], headers_of(sent)["connection"], answers.seen) == (503, "close", [])
    assert json.loads(sent[1]["body"])["error"]["code"] == "draining"
    for method in ("GET", "HEAD"):
        assert answers.ask(method)[0]["status"] == 201


def failing(error: BaseException, begun: bool = False) -> Any:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    return fails


@pytest.mark.parametrize(
    ("error", "status", "message", "code"),
    [
        (ApiError(418, "why", None, "c"), 418, "why", "c"),
        (HTTPException(404), 404, "there is nothing at /v1/x", None),
        (HTTPException(405, headers={"Allow": "GET"}), 405, "POST is not for this path", None),
        (HTTPException(406, "odd"), 406, "odd", None),
        (UserError("a file is odd"), 500, "a file is odd", "internal_error"),
    ],
)
def test_errors_are_answered(error: Exception, status: int, message: str, code: str | None) -> None:
    answers = Answers(failing(error))
    sent = answers.ask()
    told = json.loads(sent[1]["body"])["error"]
    assert (sent[0]["status"], told["message"], told["code"]) == (status, message, code)
    assert headers_of(sent).get("allow") == ("GET" if status == 405 else None)
    assert answers.front.open == 0


def test_nobody_reads_the_answer_of_a_client_that_has_gone() -> None:
    sent = Answers(failing(ClientGone())).ask()
    assert (sent[0]["status"], sent[1]["body"]) == (499, b"")


def test_what_nobody_foresaw_is_in_the_log_alone(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(failing(ValueError("the cup is empty")))
    sent = answers.ask(x_request_id="mine")
    told = json.loads(sent[1]["body"])["error"]
    assert (sent[0]["status"], told["code"]) == (500, "internal_error")
    assert told["message"] == "the server failed; its log has the reason under mine"
    assert "ValueError: the cup is empty" in capsys.readouterr().err
    sent = Answers(failing(MemoryError())).ask(x_request_id="mine")
    assert (sent[0]["status"], headers_of(sent)["retry-after"]) == (503, "1")
    said = capsys.readouterr().err
    assert said.startswith("request mine: ")
    assert said.count("\n") == 1
    answers = Answers(failing(ValueError("the cup is empty"), begun=True))
    with pytest.raises(ValueError, match="the cup is empty"):
        answers.ask()
    assert "ValueError" in capsys.readouterr().err
    assert answers.front.open == 0


def test_a_body_of_two_lengths_ends_its_connection() -> None:
    answers = Answers(fine)
    sent = answers.ask(content_length="3", transfer_encoding="chunked")
    assert (sent[0]["status"], headers_of(sent)["connection"], answers.seen) == (400, "close", [])
    told = json.loads(sent[1]["body"])["error"]["message"]
    assert told == "a body has either a Content-Length or a Transfer-Encoding"
    assert answers.ask(content_length="3")[0]["status"] == 201
    assert answers.ask(transfer_encoding="chunked")[0]["status"] == 201


def test_keys_and_origins_are_checked_first() -> None:
    answers = Answers(fine)
    assert answers.ask(host="evil.example")[0]["status"] == 403
    answers.front.keys = Keys.of([b"a"])
    assert answers.ask(host="127.0.0.1")[0]["status"] == 401
    assert answers.ask(path="/health", host="127.0.0.1")[0]["status"] == 201
    answers.seen.clear()
    assert answers.ask(host="127.0.0.1", x_api_key="a")[0]["status"] == 201
    assert answers.seen == [(answers.app, {"salt": answers.front.keys.digests[0][:16]}, 1)]


@pytest.mark.parametrize("size", [(1 << 16) - 1, 1 << 16])
def test_large_bodies_take_turns(size: int) -> None:
    """They are read in a thread, one at a time."""
    of = Alone()
    turns: list[int] = []
    turn = of.turn

    def counted() -> Any:
        turns.append(of._in_line)
        return turn()

    of.turn = counted  # type: ignore[method-assign]

    async def use(data: Any) -> Any:
        return data, of._in_line

    async def scenario() -> Any:
        gone = asyncio.Event()
        given = iter([part(b'{"a": 1}'.ljust(size))])

        async def receive() -> Any:
            for message in given:
                return message
            await gone.wait()

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        return await app.read(of, request, use)

    large = size >= 1 << 16
    assert asyncio.run(scenario()) == ({"a": 1}, int(large))
    assert turns == [0] * large


class Api:
    """A module of an API that is made up."""

    def __init__(self) -> None:
        self.prepared: list[Any] = []

    async def prepare(self, front: Any, data: Any, salt: bytes) -> Any:
        self.prepared.append((data, salt))
        return "made"

    async def whole(self, made: Any) -> Any:
        return {"whole": made}

    async def events(self, made: Any) -> AsyncGenerator[bytes, None]:
        yield f"{made}".encode()


def test_requests_are_prepared_and_answered() -> None:
    """Whole, or as a stream."""
    of, api = Alone(), Api()

    async def scenario(stream: bool | None) -> Any:
        gone = asyncio.Event()
        given = iter([part(b'{"messages": [], "odd": 1, "known": 2}')])

        async def receive() -> Any:
            for message in given:
                return message
            await gone.wait()

        request = Request({"type": "http", "method": "POST", "headers": [], "state": {"salt": b"s"}}, receive)
        kind = anthropic.CountRequest
        made = await app.prepared(of, request, api, kind, {"known"})  # type: ignore[arg-type]
        response = await app.answered(request, api, made, stream)  # type: ignore[arg-type]
        if not stream:
            return response.body
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await response({}, receive, send)
        return [message["body"] for message in sent[1:]]

    assert asyncio.run(scenario(None)) == asyncio.run(scenario(False)) == b'{"whole":"made"}'
    assert asyncio.run(scenario(True)) == [b"made", b""]
    data = {"messages": [], "odd": 1, "known": 2}
    assert api.prepared == [(data, b"s")] * 3
    assert of.unknown == {"odd": 3}
