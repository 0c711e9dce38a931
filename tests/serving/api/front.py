"""A front in the test's process, on a port of its own, with a fake engine behind it; and a plain HTTP client."""

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from tests.fakes.serving_engine import FakeEngine
from tests.text.checkpoints import eos_of, write_tokenizer
from umbra.executor.config.load import load_case
from umbra.models.tokenizers import tokenizer_in
from umbra.serving.api.auth import ApiKeys
from umbra.serving.api.compiling import Compiler
from umbra.serving.api.front import Front, Text
from umbra.serving.api.server import listening, make_server
from umbra.serving.ranks.client import EngineClient
from umbra.serving.ranks.messages import Submit
from umbra.text.tokenizer import Tokenizer

PATIENCE_S = 300.0  # machines are busy
Result = TypeVar("Result")


@lru_cache
def family_tokenizer(family: str) -> Tokenizer:
    """Returns a tokenizer of single bytes, with the marks of the family."""
    folder = Path(tempfile.mkdtemp(prefix="umbra-test-"))
    return tokenizer_in(folder, write_tokenizer(folder, family))


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream, as JSON; comments are left out."""
        events = []
        for block in self.body.decode().split("\n\n"):
            if block.startswith("data: "):
                events.append("[DONE]" if block == "data: [DONE]" else json.loads(block[6:]))
        return events


@dataclass
class Connection:
    """One request on a connection of its own."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    reply: Reply = field(default_factory=lambda: Reply(0, {}))

    async def head(self) -> Reply:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        self.reply = Reply(int(lines[0].split()[1]), headers)
        return self.reply

    async def chunk(self) -> bytes:
        """The next chunk of a body that has no length; empty at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def all(self) -> Reply:
        reply = await self.head()
        if "content-length" in reply.headers:
            reply.body = await self.reader.readexactly(int(reply.headers["content-length"]))
        else:
            while data := await self.chunk():
                reply.body += data
        return reply

    def kill(self) -> None:
        """As a client that is gone at once."""
        self.writer.transport.abort()


async def connect(
    port: int,
    path: str,
    data: Any = None,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    raw: bytes | None = None,
    buffer: int = 0,
) -> Connection:
    """A connection on which a request was sent, with `data` as JSON or `raw` as its body. `buffer` is the number of
    bytes that the system keeps of an answer which is not read; 0: its choice."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    reader, writer = await asyncio.open_connection(sock=connection)
    body = raw if raw is not None else b"" if data is None else json.dumps(data).encode()
    lines = {"host": f"127.0.0.1:{port}", "content-length": str(len(body))} | (headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    return Connection(reader, writer)


@dataclass
class Server:
    front: Front
    engine: FakeEngine
    port: int
    tokenizer: Tokenizer

    async def open(self, path: str, data: Any = None, method: str = "POST", **more: Any) -> Connection:
        return await connect(self.port, path, data, method, **more)

    async def ask(self, path: str, data: Any = None, method: str = "POST", **more: Any) -> Reply:
        connection = await self.open(path, data, method, **more)
        try:
            return await asyncio.wait_for(connection.all(), PATIENCE_S)
        finally:
            connection.writer.close()

    async def get(self, path: str, **more: Any) -> Reply:
        return await self.ask(path, None, "GET", **more)

    async def chat(self, content: str = "Hi", **fields: Any) -> Reply:
        return await self.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]} | fields)

    async def complete(self, prompt: Any = "Hi", **fields: Any) -> Reply:
        return await self.ask("/v1/completions", {"prompt": prompt} | fields)


async def until(condition: Callable[[], object]) -> None:
    """Waits until `condition` holds."""
    end = asyncio.get_running_loop().time() + PATIENCE_S
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    answer: str | Callable[[Submit], Sequence[int] | str] = "Hello!",
    family: str = "qwen3",
    ready: bool = True,
    keys: ApiKeys | None = None,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    """`answer` is the text of every answer, or a function of the request. `settings` are keys of `serve_config`."""
    tokenizer = family_tokenizer(family)
    case = load_case("demo_chat", settings={f"serve_config.{key}": value for key, value in settings.items()})
    with tempfile.TemporaryDirectory() as folder, listening("127.0.0.1", 0) as listener:
        client = EngineClient(Path(folder) / "engine")
        await client.listen()

        def ids(submit: Submit) -> Sequence[int] | str:
            return answer(submit) if callable(answer) else tokenizer.encode(answer, chat=False)

        ends = [eos_of(tokenizer)]
        size = tokenizer.backend.get_vocab_size()
        options: dict[str, Any] = {"vocabulary": size, "stop_ids": ends} | (engine or {})
        fake = FakeEngine(client.path, ids, **options)
        front = Front(case, keys or ApiKeys(), client)
        front.text = Text(case, tokenizer, Compiler(tokenizer.folder, options["vocabulary"], options["stop_ids"]))
        client.changed = front.take
        server = make_server(front)
        http = asyncio.create_task(server.serve([listener]))
        await fake.connect(ready)
        if ready:
            await until(lambda: client.ready)
        try:
            yield Server(front, fake, listener.getsockname()[1], tokenizer)
        finally:
            server.should_exit = server.force_exit = True
            await fake.close()
            await http
            client.close()
            front.close()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)


def run(scenario: Callable[[Server], Coroutine[Any, Any, Result]], *arguments: Any, **options: Any) -> Result:
    """Runs `scenario` beside a server that is made as `serving` makes it."""

    async def whole() -> Result:
        async with serving(*arguments, **options) as server:
            return await scenario(server)

    return asyncio.run(whole())
