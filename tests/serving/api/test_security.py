"""What an attacker can send, and what the front then still does for everybody else."""

import ast
import asyncio
import hmac
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serving.api import auth, server
from serving.api.auth import Keys
from serving.api.body import LARGEST_BODY
from serving.ranks import channel
from serving.ranks.channel import HEADER
from serving.ranks.messages import Ready
from tests.serving.api.front import Connection, Server, until
from tests.serving.api.test_chat import TOOL, run
from umbra.errors import UserError
from umbra.files import ROOT

ASKED = [{"role": "user", "content": "Hi"}]
OTHERS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
OTHERS_CALLS = {"eval", "exec", "load_module", "broadcast_object_list", "gather_object", "scatter_object_list"}


@pytest.mark.parametrize("file", sorted((ROOT / "serving").rglob("*.py")), ids=lambda file: file.stem)
def test_nothing_that_comes_in_is_read_as_a_program(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not OTHERS_CODE & {name.partition(".")[0] for name in names}
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert name not in OTHERS_CALLS


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys, whichever fits, and only by digests of one length."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    async def scenario(server: Server) -> None:
        monkeypatch.setattr(auth, "hmac", type("", (), {"compare_digest": staticmethod(compare)}))
        for key, status in (("first", 200), ("second", 200), ("f", 401), ("first" * 1000, 401), ("", 401)):
            compared.clear()
            reply = await server.ask("/v1/completions", {"prompt": "Hi"}, headers={"authorization": f"Bearer {key}"})
            assert reply.status == status
            assert len(compared) == 2
            assert {len(digest) for pair in compared for digest in pair} == {32}

    run(scenario, keys=Keys.of([b"first", b"second"]))


@pytest.mark.parametrize("length", [True, False])
def test_a_body_that_is_too_large_is_not_read(length: bool) -> None:
    """Neither one that says so, nor one that comes in chunks."""

    async def scenario(server: Server) -> None:
        headers = {"content-length": str(LARGEST_BODY + 1)} if length else {"transfer-encoding": "chunked"}
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        lines = "".join(f"{name}: {value}\r\n" for name, value in {"host": "127.0.0.1", **headers}.items())
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{lines}\r\n".encode())
        if not length:
            chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
            for _ in range((LARGEST_BODY >> 20) + 1):
                writer.write(chunk)
        reply = await Connection(reader, writer).all()
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        writer.close()

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"messages": ASKED * 4097}, "messages", "4097"),
        ({"tools": [TOOL] * 129}, "tools", "129"),
        ({"n": 65}, "n", "65"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias", "4097"),
        ({"stop_token_ids": list(range(4097))}, "stop_token_ids", "4097"),
        ({"metadata": [[[[]]]] * 10}, None, ""),
    ],
)
def test_counts_have_bounds(fields: dict[str, Any], param: str | None, said: str) -> None:
    async def scenario(server: Server) -> None:
        reply = await server.ask("/v1/chat/completions", {"messages": ASKED} | fields)
        if param:
            assert (reply.status, reply.error["param"]) == (400, param)
            assert said in reply.error["message"]
        else:
            assert reply.status == 200

    run(scenario, engine={"vocabulary": 1 << 16})


def test_a_request_cannot_bring_a_template() -> None:
    async def scenario(server: Server) -> None:
        evil = "{% for i in range(10**9) %}{{ i }}{% endfor %}"
        for fields in ({"chat_template": evil}, {"chat_template_kwargs": {"chat_template": evil}}):
            for path, asked in (
                ("/v1/chat/completions", {"messages": ASKED}),
                ("/v1/responses", {"input": "Hi"}),
                ("/v1/messages", {"messages": ASKED, "max_tokens": 9}),
                ("/tokenize", {"messages": ASKED}),
            ):
                reply = await server.ask(path, asked | fields)
                assert reply.status == 400 or "range" not in server.tokenizer.decode(server.engine.submitted[-1].ids)
            assert (await server.chat(**fields)).status == 400

    run(scenario)


def test_many_connections_without_a_request_keep_nobody_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of them end, whether they say nothing, begin headers or begin a body; requests that run do not."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 20)

    async def scenario(server: Server) -> None:
        stream = await server.open("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 900})
        await stream.head()
        kept = await server.open("/health", method="GET")
        await kept.all()
        flood = []
        begun = (
            b"",
            b"GET /health HTTP/1.1\r\nx: ",
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{",
        )
        for number in range(60):
            connection = await asyncio.open_connection("127.0.0.1", server.port)
            connection[1].write(begun[number % 3])
            flood.append(connection)
            assert (await server.get("/health")).status == 200
        gone = await asyncio.gather(*(ended(reader) for reader, _ in flood[:30]))
        assert all(gone)
        assert await ended(kept.reader)
        assert await stream.chunk()
        for connection in (*(writer for _, writer in flood), stream.writer):
            connection.transport.abort()

    run(scenario, "word " * 500, engine={"step_s": 0.02})


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 30) in (b"", b"{")
    except ConnectionResetError:
        return True


def test_endless_headers_end_their_connection() -> None:
    async def scenario(server: Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\n")
        try:
            for _ in range(200):
                writer.write(b"x: " + b"y" * 1000 + b"\r\n")
                await writer.drain()
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 4")
        except ConnectionError:
            pass  # it was closed while it was written to
        assert (await server.get("/health")).status == 200

    run(scenario)


def test_a_body_of_two_lengths_is_refused_with_its_connection() -> None:
    async def scenario(server: Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        hidden = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        lengths = b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n" + lengths + hidden)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1

    run(scenario)


@pytest.mark.parametrize("method", ["POST", "HEAD"])
def test_a_body_that_breaks_off_gets_one_answer(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The application would answer as well, after the connection has said that it ends. An answer to HEAD has no
    body."""

    async def scenario(server: Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        lines = f"{method} /nowhere HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nno length\r\n"
        writer.write(lines.encode())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1
        assert (b"error" in answer) == (method == "POST")
        assert (await server.get("/health")).status == 200

    run(scenario)
    assert "Traceback" not in capsys.readouterr().err


def test_errors_are_one_line_whatever_names_are_in_them() -> None:
    async def scenario(server: Server) -> None:
        reply = await server.chat(model="a\n\x1b[2J\nb")
        assert reply.status == 404
        assert reply.error["message"] == "there is no model a  [2J b: this server has demo_chat"

    run(scenario)


def test_a_tokenizer_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some tokenizers of strangers fail with some texts only."""

    async def scenario(server: Server) -> None:
        def fail(ids: list[int]) -> str:
            raise UserError("x: tokenizer failed: index out of bounds")

        monkeypatch.setattr(server.tokenizer, "whole_text", fail)
        for stream in (False, True):
            reply = await server.complete([1, 2], stream=stream)
            error = reply.events[-1]["error"] if stream and reply.status == 200 else reply.error
            assert error["message"] == "x: tokenizer failed: index out of bounds"
        reply = await server.ask("/detokenize", {"tokens": [1]})
        assert (reply.status, reply.error["param"]) == (400, "tokens")

    run(scenario)
    assert "Traceback" not in capsys.readouterr().err


def test_what_nobody_foresaw_is_status_500_and_a_traceback_in_the_log_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(server: Server) -> None:
        def fail(text: str, chat: bool, special: bool = True) -> list[int]:
            raise ValueError("the cup is empty")

        monkeypatch.setattr(server.tokenizer, "encode", fail)
        reply = await server.complete("Hi")
        assert reply.status == 500
        assert b"cup" not in reply.body
        assert b"Traceback" not in reply.body

    run(scenario)
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "ValueError: the cup is empty" in printed


@pytest.mark.parametrize("given", [None, True, False])
def test_special_tokens_are_added_unless_that_is_declined(monkeypatch: pytest.MonkeyPatch, given: bool | None) -> None:
    asked = []

    async def scenario(server: Server) -> None:
        def encode(text: str, chat: bool, special: bool = True) -> list[int]:
            if text == "Hi":
                asked.append((chat, special))
            return [1, 2]

        monkeypatch.setattr(server.tokenizer, "encode", encode)
        wanted = {} if given is None else {"add_special_tokens": given}
        assert (await server.complete("Hi", **wanted)).status == 200
        assert (await server.ask("/tokenize", {"prompt": "Hi"} | wanted)).json["tokens"] == [1, 2]

    run(scenario)
    assert asked == 2 * [(False, given is not False)]


def test_a_body_may_be_as_large_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.api.body.LARGEST_BODY", 64)

    async def scenario(server: Server) -> None:
        for size, status in ((64, 200), (65, 413)):
            raw = b'{"prompt": "Hi"}'.ljust(size)
            assert (await server.ask("/v1/completions", raw=raw)).status == status

    run(scenario)


def test_ranks_without_pages_cannot_be_read() -> None:
    """A division by their number was a traceback, and the front went on without its ranks."""

    async def scenario(server: Server) -> None:
        body = msgspec.msgpack.encode(Ready(416, 4, 96, 16, 0, 1, [0], 100.0))
        server.engine._writer.write(HEADER.pack(len(body)) + body)
        await until(lambda: not server.front.client.alive)
        assert "a message of rank 0 cannot be read: Expected `int` >= 1 - at `$.pages`" in server.front.client.reason

    run(scenario)


def test_messages_that_are_nested_too_deeply_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fields that nothing reads; the other side is taken for lost."""

    def framed(message: dict[str, Any]) -> bytes:
        body = msgspec.msgpack.encode(message)[:-1] + b"\x91" * 100_000 + b"\0"
        return HEADER.pack(len(body)) + body

    monkeypatch.setattr(channel, "ORPHAN_S", 0.0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "engine"))
        listener.listen()
        ours = channel.Channel(tmp_path / "engine")
        theirs, _ = listener.accept()
        monkeypatch.setattr(channel.os, "_exit", lambda status: None)
        theirs.sendall(framed({"type": "Submit", "id": 1, "ids": [1], "sampling": {"max_tokens": 1, "x": 0}}))
        assert ours.receive(30) == [None]
        assert "the front's messages cannot be read: maximum recursion depth" in capsys.readouterr().out
        theirs.close()
        ours.close()

    async def scenario(server: Server) -> None:
        row = {"id": 1, "tokens": [], "x": 0}
        server.engine._writer.write(framed({"type": "Out", "step": 1, "rows": [row]}))
        await until(lambda: not server.front.client.alive)
        assert "a message of rank 0 cannot be read: maximum recursion depth" in server.front.client.reason

    run(scenario)
