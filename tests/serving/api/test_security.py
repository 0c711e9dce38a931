"""Attacks on the front, and the service that everybody else still gets meanwhile."""

import asyncio
import hmac
import ssl
import subprocess
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from tests.serving.api.front import Connection, Server, run
from umbra.base.errors import UserError
from umbra.serving.api import auth, server
from umbra.serving.api.auth import ApiKeys, check_address, check_certificate, check_origin
from umbra.serving.api.body import LARGEST_BODY
from umbra.serving.api.errors import ApiError


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b" first \n\n\tsecond\r\n")
    assert ApiKeys.read(str(file)) == ApiKeys.of([b"first", b"second"])
    assert ApiKeys.read("") == ApiKeys()
    for content, said in ((b" \n", "has no key: write one a line"), (b"x" * (auth.LARGEST + 1), "is larger than 1 MB")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=said):
            ApiKeys.read(str(file))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        ApiKeys.read(str(tmp_path / "nothing"))


def test_keys_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """In either header; prefixes of one key are not found by another. All keys are compared, whichever fits, in
    constant time: by digests of one length."""
    compared: list[int] = []
    equal = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.extend((len(one), len(other)))
        return equal(one, other)

    async def scenario(server: Server) -> None:
        monkeypatch.setattr(hmac, "compare_digest", compare)
        for headers in (
            {"authorization": "bearer  first "},
            {"authorization": "Basic x", "x-api-key": "first"},
            {"x-api-key": "second"},
        ):
            assert (await server.ask("/v1/completions", {"prompt": "Hi"}, headers=headers)).status == 200
        salts = [submit.salt for submit in server.engine.submitted]
        assert salts[0] == salts[1] != salts[2]
        assert compared == [32] * 4 * len(salts)
        for wrong in ({}, {"authorization": "first"}, {"authorization": "Bearer x", "x-api-key": "first"}):
            refused = await server.ask("/v1/completions", {"prompt": "Hi"}, headers=wrong)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")

    run(scenario, keys=ApiKeys.of([b"first", b"second"]))


def test_only_this_machine_needs_no_key() -> None:
    for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"):
        check_address(host, ApiKeys())
    for host in ("0.0.0.0", "10.0.0.1", "example.com", "", "::"):
        check_address(host, ApiKeys.of([b"a"]))
        with pytest.raises(UserError, match="api_key_file"):
            check_address(host, ApiKeys())


@pytest.mark.parametrize(
    ("host", "origin", "code"),
    [
        ("a:80", "", ""),
        ("10.0.0.1:80", "", ""),
        ("[::1]:80", "", ""),
        ("b:80", "", "wrong_host"),
        ("a:80", "http://a:80", ""),
        ("a:80", "http://a", "cross_origin"),
        ("a", "null", "cross_origin"),
    ],
)
def test_pages_of_other_sites_are_told_by_their_headers(host: str, origin: str, code: str) -> None:
    """A foreign page does not know the key, so a name of its own does not matter where one is wanted."""
    headers = Headers({"host": host} | ({"origin": origin} if origin else {}))
    for keys, wanted in ((ApiKeys(), code), (ApiKeys.of([b"a"]), code.removeprefix("wrong_host"))):
        if wanted:
            with pytest.raises(ApiError) as refused:
                check_origin(headers, "a", keys)
            assert (refused.value.status, refused.value.code) == (403, wanted)
        else:
            check_origin(headers, "a", keys)


def test_pages_of_allowed_origins() -> None:
    async def scenario(server: Server) -> None:
        page = {"origin": "http://localhost:3000"}
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        before = await server.ask("/v1/completions", method="OPTIONS", headers=page | asks)
        assert (before.status, before.headers["access-control-allow-origin"]) == (200, page["origin"])
        assert "authorization" in before.headers["access-control-allow-headers"]
        for headers, status in ((page, 401), (page | {"x-api-key": "a"}, 200)):  # a page reads why it was refused
            reply = await server.ask("/v1/completions", {"prompt": "Hi"}, headers=headers)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, page["origin"])
        other = await server.ask("/v1/completions", {"prompt": "Hi"}, headers={"origin": "http://b", "x-api-key": "a"})
        assert (other.status, "access-control-allow-origin" in other.headers) == (403, False)
        assert "serve_config.cors_origins" in other.error["message"]

    run(scenario, keys=ApiKeys.of([b"a"]), cors_origins=["http://localhost:3000"])


def test_answers_over_tls(tmp_path: Path) -> None:
    """Files that do not fit are refused before the port is opened; a key with a password asks nobody for it."""
    certificate, key, locked = (str(tmp_path / name) for name in ("certificate", "key", "locked"))
    for command in (
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=a -keyout {key} -out {certificate}",
        f"openssl rsa -aes128 -passout pass:x -in {key} -out {locked}",
    ):
        subprocess.run(command.split(), check=True, capture_output=True)
    for files, said in (
        (("", key), "belongs to ssl_certfile"),
        (("nothing", key), "ssl_certfile: nothing: there is no such file"),
        ((certificate, ""), "cannot be used"),
        ((certificate, locked), "cannot be used"),
    ):
        with pytest.raises(UserError, match=said):
            check_certificate(*files)
    check_certificate(certificate, key)

    async def scenario(server: Server) -> None:
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        body = b'{"prompt": "Hi", "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        assert (await Connection(reader, writer).all()).events[-1] == "[DONE]"
        writer.close()

    run(scenario, ssl_certfile=certificate, ssl_keyfile=key)


def test_a_body_that_is_too_large_is_not_read() -> None:
    """Even if it comes in chunks."""

    async def scenario(server: Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range((LARGEST_BODY >> 20) + 1):
            writer.write(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
        reply = await Connection(reader, writer).all()
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        writer.close()

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
        for writer in (*(writer for _, writer in flood), stream.writer):
            writer.transport.abort()

    run(scenario, "word " * 500, engine={"step_s": 0.02})


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 300) in (b"", b"{")
    except ConnectionResetError:
        return True


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


def test_a_tokenizer_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Some tokenizers of strangers fail with some texts only: that is one line. What nobody foresaw is status 500, and
    a traceback in the log alone."""

    async def scenario(server: Server) -> None:
        def fail(ids: list[int]) -> str:
            raise UserError("x: tokenizer failed: index out of bounds")

        def surprise(text: str, chat: bool, special: bool = True) -> list[int]:
            raise ValueError("the cup is empty")

        monkeypatch.setattr(server.tokenizer, "whole_text", fail)
        for stream in (False, True):
            reply = await server.complete([1, 2], stream=stream)
            error = reply.events[-1]["error"] if stream and reply.status == 200 else reply.error
            assert error["message"] == "x: tokenizer failed: index out of bounds"
        assert "Traceback" not in capsys.readouterr().err
        monkeypatch.setattr(server.tokenizer, "encode", surprise)
        reply = await server.complete("Hi")
        assert reply.status == 500
        assert b"cup" not in reply.body

    run(scenario)
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "ValueError: the cup is empty" in printed
