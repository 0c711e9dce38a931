"""A front without a port or ranks: bytes go to its connections, and each request is answered with two tokens."""

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncGenerator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import h11
import msgspec
from uvicorn.server import ServerState

from tests.fakes.serving_engine import logprob
from tests.fuzz.target import Violation
from tests.text.checkpoints import eos_of, write_tokenizer
from umbra.base.errors import LONGEST
from umbra.executor.config.load import load_case
from umbra.models.tokenizers import tokenizer_in
from umbra.serving.api.auth import ApiKeys
from umbra.serving.api.compiling import Compiler
from umbra.serving.api.front import Front, Text
from umbra.serving.api.server import make_server
from umbra.serving.ranks.channel import framed
from umbra.serving.ranks.client import EngineClient
from umbra.serving.ranks.messages import ChannelMessage, Ready, Row, Submit, ToEngine

ROUNDS = 200  # of the event loop, after which a request that has come is answered


class Engine(EngineClient):
    """Every request is sent and read as the one rank would, and answered at once."""

    def __init__(self, folder: Path, vocabulary: int, end: int):
        super().__init__(folder / "none")
        self.ready = Ready(2000, 4, vocabulary, 16, 64, 1, [end], 1e6)
        self.alive, self.end = True, end
        self._reads: Any = msgspec.msgpack.Decoder(ToEngine)

    async def rows(self, submit: Submit) -> AsyncGenerator[Row, None]:
        ids, sampling = submit.ids, submit.sampling
        assert self._reads.decode(framed(submit)[4:]) == submit
        wanted, prompt = sampling.logprobs, sampling.prompt_logprobs
        of_prompt = () if prompt is None else tuple(logprob(token, prompt) for token in ids[1:])
        for token, finish in ((65, "length" if sampling.max_tokens == 1 else ""), (self.end, "stop")):
            chosen = () if wanted is None else (logprob(token, wanted),)
            yield Row(submit.id, [token], finish, logprobs=chosen, prompt_logprobs=of_prompt)
            if finish:
                return
            of_prompt = ()

    def send(self, message: ChannelMessage) -> None: ...

    @property
    def serving(self) -> bool:
        return True


class AtOnce(Executor):
    """Without threads, of which handing over takes longer than most of the work does."""

    def submit(self, call: Any, /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*given, **named))
        except Exception as error:
            done.set_exception(error)
        return done


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


class Api:
    def __init__(self, folder: Path, family: str = "qwen3"):
        self.loop = asyncio.new_event_loop()
        model = folder / "model"
        size = write_tokenizer(model, family)
        tokenizer = tokenizer_in(model, size)
        case, eos = load_case("demo_chat"), eos_of(tokenizer)
        self.front = Front(case, ApiKeys(), Engine(folder, size, eos), threads=AtOnce())
        self.front.text = Text(case, tokenizer, Compiler(model, size, [eos]))
        self.config = make_server(self.front).config
        self.config.load()

    def ask(self, path: str, body: bytes) -> None:
        self.send([request(f"POST {path}".encode(), body)])

    def send(self, pieces: list[bytes]) -> None:
        """Sends the pieces over one connection. Raises Violation for an answer that is neither good nor one line of
        error."""
        with contextlib.redirect_stderr(io.StringIO()) as said:
            sent = self.loop.run_until_complete(self._connect(pieces))
        check_answers(sent)
        if said.getvalue():
            raise Violation(said.getvalue())
        if self.front.open or self.front.limits.open or self.front.limits.waiting_tokens or self.front.busy:
            raise Violation("a request is still counted")

    async def _connect(self, pieces: list[bytes]) -> bytes:
        protocol_class: Any = self.config.http_protocol_class
        state = ServerState()
        protocol = protocol_class(config=self.config, server_state=state, app_state={}, _loop=self.loop)
        transport = Transport(protocol, self.loop)
        protocol.connection_made(transport)
        for piece in pieces:
            if not transport.closed:
                protocol.data_received(piece)
                await asyncio.sleep(0)
        for _ in range(ROUNDS):
            if not state.tasks:
                break
            await asyncio.sleep(0 if not self.front.busy else 0.001)
        transport.close()
        await asyncio.sleep(0)
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=10)
            if state.tasks:
                raise Violation("a request outlives its connection")
        return transport.sent


def request(first: bytes, body: bytes = b"", *more: bytes) -> bytes:
    length = [b"content-length: %d" % len(body)] if body and not more else []
    return b"\r\n".join([first + b" HTTP/1.1", b"host: 127.0.0.1", *more, *length, b"", b""]) + body


def check_answers(sent: bytes) -> None:
    """The first answer, unless the client has left it, is good or one line of error."""
    if not sent:
        return
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(sent)
    status, kind, body = 0, "", b""
    while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
        if isinstance(event, h11.Response):
            status, kind = event.status_code, dict(event.headers).get(b"content-type", b"").decode()
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            check_answer(status, body, kind)
            return


def check_answer(status: int, body: bytes, kind: str) -> None:
    if status >= 500:
        raise Violation(f"status {status}: {body[:300]!r}")
    if kind.startswith("text/event-stream"):
        for block in body.decode().split("\n\n"):
            data = block.rpartition("data: ")[2]
            if data and data != "[DONE]" and not block.startswith(":"):
                json.loads(data)
    elif status != 200:
        error = json.loads(body)["error"]
        if "\n" in error["message"] or len(error["message"]) > LONGEST:
            raise Violation(f"an error of {len(error['message'])} characters: {error['message'][:200]!r}")
    elif kind.startswith("application/json"):
        json.loads(body)
