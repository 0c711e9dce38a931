"""Bytes that come over a connection: HTTP, up to the routes and back."""

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Any

import h11
from uvicorn.server import ServerState

from serving.api.server import make_server
from tests.fuzz.front import Api
from tests.fuzz.target import Target, Violation

ROUNDS = 200  # of the event loop, after which a request that has come is answered


class Transport(asyncio.Transport):
    """Loses its connection soon after it is closed, as asyncio's does."""

    def __init__(self, protocol: asyncio.Protocol, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.protocol, self.loop = protocol, loop
        self.sent, self.closed = b"", False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 80)}.get(name, default)

    def write(self, data: Any) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.loop.call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def http(folder: Path) -> Target:
    """The first byte says into how many pieces the rest is cut."""
    api = Api(folder)
    config = make_server(api.front).config
    config.load()

    async def connect(pieces: list[bytes]) -> bytes:
        made: Any = config.http_protocol_class
        state = ServerState()
        protocol = made(config=config, server_state=state, app_state={}, _loop=api.loop)
        transport = Transport(protocol, api.loop)
        protocol.connection_made(transport)
        for piece in pieces:
            if not transport.closed:
                protocol.data_received(piece)
                await asyncio.sleep(0)
        for _ in range(ROUNDS):
            if not state.tasks:
                break
            await asyncio.sleep(0 if not api.front.busy else 0.001)
        transport.close()
        await asyncio.sleep(0)
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=10)
            if state.tasks:
                raise Violation("a request outlives its connection")
        return transport.sent

    def run(data: bytes) -> None:
        count, rest = data[0] % 8 + 1 if data else 1, data[1:]
        step = max(1, -(-len(rest) // count))
        with contextlib.redirect_stderr(io.StringIO()) as said:
            sent = api.loop.run_until_complete(connect([rest[at : at + step] for at in range(0, len(rest), step)]))
        _check(sent)
        if said.getvalue():
            raise Violation(said.getvalue())
        if api.front.open or api.front.limits.open or api.front.limits.waiting_tokens:
            raise Violation("a request is still counted")

    def request(first: bytes, body: bytes = b"", *more: bytes) -> bytes:
        length = [b"content-length: %d" % len(body)] if body and not more else []
        return b"\r\n".join([first + b" HTTP/1.1", b"host: 127.0.0.1", *more, *length, b"", b""]) + body

    chat = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": true}'
    chunked = b"5\r\n" + chat[:5] + b"\r\n%x\r\n" % (len(chat) - 5) + chat[5:] + b"\r\n0\r\n\r\n"
    seeds = [
        request(b"GET /health"),
        request(b"GET /v1/models/x%20y?a=b"),
        request(b"HEAD /metrics"),
        request(b"GET /"),
        request(b"GET /openapi.json"),
        request(b"OPTIONS *"),
        request(b"POST /v1/chat/completions", chat),
        request(b"POST /tokenize", b'{"prompt": "x"}') * 2,
        request(b"POST /v1/chat/completions", chunked, b"transfer-encoding: chunked", b"expect: 100-continue"),
        request(
            b"POST /v1/completions",
            b'{"prompt": "x"}',
            b"content-length: 15",
            b"x-request-id: 1",
            b"authorization: Bearer x",
        ),
        request(
            b"GET /v1/models",
            b"",
            b"origin: http://127.0.0.1",
            b"connection: keep-alive, upgrade",
            b"upgrade: websocket",
        ),
    ]
    return Target(run, [bytes([number % 8]) + seed for number, seed in enumerate(seeds)], json=False)


def _check(sent: bytes) -> None:
    """What was sent is a row of answers, of which none says that the server has failed."""
    connection = h11.Connection(h11.CLIENT)
    while sent and connection.their_state is not h11.MUST_CLOSE:
        if connection.our_state is h11.IDLE:
            connection.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
            connection.send(h11.EndOfMessage())
            connection.receive_data(sent)
            sent = b""
        event = connection.next_event()
        while event not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Response) and event.status_code >= 500:
                raise Violation(f"status {event.status_code}: {connection.trailing_data[0][:300]!r}")
            if isinstance(event, h11.ConnectionClosed):
                return
            event = connection.next_event()
        return
