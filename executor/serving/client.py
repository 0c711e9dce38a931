"""The front's end of the socket to rank 0: requests go in, rows come out, each to the one who asked."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import msgspec

from executor.serving.channel import HEADER, framed, length_of
from executor.serving.messages import (
    Abort,
    Fatal,
    Message,
    Out,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Residency,
    Row,
    Sampling,
    State,
    Stop,
    Submit,
    ToFront,
    Watch,
)

PING_S = 2.0


class EngineGone(Exception):
    """The ranks have ended, or do not take requests yet; the text says why."""


class RequestRefused(Exception):
    """The engine cannot run this request; the text says why."""


class EngineClient:
    """Listens on a Unix socket at `path`, to which rank 0 connects. `changed` is called after each message that is not
    a row, with that message."""

    def __init__(self, path: Path, changed: Callable[[Message], None] = lambda message: None):
        self.path, self.changed = path, changed
        self.ready: Ready | None = None
        self.progress = Progress("starting", 0.0)
        self.state: State | None = None
        self.residency: Residency | None = None
        self.reason = ""  # why the ranks have ended
        self.alive = False  # whether rank 0 is connected
        self.pong_at = 0.0  # time of its last answer to a ping
        self.rows_at = time.monotonic()  # time of its last rows
        self._waiting: dict[int, asyncio.Queue[Row | Exception]] = {}
        self._ids = itertools.count()
        self._decoder: Any = msgspec.msgpack.Decoder(ToFront)
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self.gone = asyncio.Event()  # set while no rank is connected after one was
        self._pings = itertools.count()

    async def listen(self) -> None:
        """Returns when ranks can connect."""
        self._server = await asyncio.start_unix_server(self._serve, path=str(self.path))

    def close(self) -> None:
        if self._server:
            self._server.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    @property
    def open_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._waiting)

    def next_id(self) -> int:
        return next(self._ids)

    async def rows(
        self, ids: list[int], sampling: Sampling, priority: int = 0, salt: bytes = b"", id: int | None = None
    ) -> AsyncGenerator[Row, None]:
        """Submits a request and yields its rows; the last one has a finish reason. `id` is one of `next_id`, for those
        who want to know it. Closing the iterator ends the request. Raises RequestRefused or EngineGone."""
        if not self.ready or not self._writer:
            raise EngineGone(self.reason or "the model is still loading")
        id = self.next_id() if id is None else id
        queue = self._waiting[id] = asyncio.Queue()
        finished = False
        try:
            self.send(Submit(id, ids, sampling, priority, salt))
            while not finished:
                row = await queue.get()
                if isinstance(row, Exception):
                    finished = True
                    raise row
                finished = bool(row.finish)
                yield row
        finally:
            self._waiting.pop(id, None)
            if not finished and self._writer:
                self.send(Abort(id))

    def send(self, message: Message) -> None:
        if self._writer:
            self._writer.write(framed(message))

    def watch(self, residency: bool) -> None:
        self.send(Watch(residency))

    def stop(self) -> None:
        """Asks the ranks to leave."""
        self.send(Stop())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer:  # only one rank 0 at a time
            writer.close()
            return
        self._writer, self.alive, self.reason = writer, True, ""
        self.gone.clear()
        pings = asyncio.create_task(self._ping())
        try:
            while True:
                header = await reader.readexactly(HEADER.size)
                self._take(self._decoder.decode(await reader.readexactly(length_of(header))))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, msgspec.MsgspecError) as error:
            self.reason = self.reason or (
                "the ranks have ended" if isinstance(error, asyncio.IncompleteReadError) else f"{error}"
            )
        finally:
            pings.cancel()
            self._writer, self.ready, self.alive, self.state = None, None, False, None
            self.progress = Progress("starting", 0.0)
            for queue in self._waiting.values():
                queue.put_nowait(EngineGone(self.reason))
            self.gone.set()
            writer.close()

    async def _ping(self) -> None:
        while True:
            self.send(Ping(next(self._pings)))
            await asyncio.sleep(PING_S)

    def _take(self, message: Message) -> None:
        if isinstance(message, Out):
            self.rows_at = time.monotonic()
            for row in message.rows:
                if queue := self._waiting.get(row.id):
                    queue.put_nowait(row)
            return
        if isinstance(message, Refused):
            if queue := self._waiting.get(message.id):
                queue.put_nowait(RequestRefused(message.reason))
        elif isinstance(message, Ready):
            self.ready, self.pong_at = message, time.monotonic()
        elif isinstance(message, Progress):
            self.progress = message
        elif isinstance(message, State):
            self.state = message
        elif isinstance(message, Residency):
            self.residency = message
        elif isinstance(message, Pong):
            self.pong_at = time.monotonic()
        elif isinstance(message, Fatal):
            self.reason = message.reason
        self.changed(message)
