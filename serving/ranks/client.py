"""The front's end of the socket to rank 0: requests go in, rows come out, each to the one who asked."""

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from umbra.serving.ranks.channel import HEADER, framed, length_of
from umbra.serving.ranks.messages import (
    Abort,
    ChannelMessage,
    Fatal,
    Out,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Residency,
    Row,
    State,
    Stop,
    Submit,
    ToFront,
    Watch,
)

PING_S = 2.0
FRESH_S = 10.0  # ranks that have not answered for this long, and for two of their longest steps, do not serve
ENDED = "the ranks have ended"


class EngineGone(Exception):
    """The ranks have ended, or do not take requests yet; the text says why."""


class RequestRefused(Exception):
    """The engine cannot run this request; the text says why."""


@dataclass
class Asked:
    """A request that has not ended."""

    submit: Submit
    rows: asyncio.Queue[Row | Exception] = field(default_factory=asyncio.Queue)
    begun: bool = False  # whether a row has come


class EngineClient:
    """Listens on a Unix socket at `path`, to which rank 0 connects. `changed` is called after each message that is not
    a row, with that message."""

    def __init__(self, path: Path, changed: Callable[[ChannelMessage], None] = lambda message: None):
        self.path, self.changed = path, changed
        self.ready: Ready | None = None
        self.progress = Progress("starting", 0.0)
        self.state: State | None = None
        self.residency: Residency | None = None
        self.reason = ""  # why the ranks have ended
        self.alive = False  # whether rank 0 is connected
        self.heard_at = 0.0  # time of its last rows or its last answer to a ping
        self.longest_step = 0.0  # most seconds that it took to answer a ping, which it does between two steps
        self.supervised = False  # whether somebody calls `lost` when the ranks have ended
        self.gone = asyncio.Event()  # set while no rank is connected after one was
        self.asked: dict[int, Asked] = {}  # requests that have not ended
        self._ids = itertools.count()  # goes on when ranks are started again, so that no id comes twice
        self._decoder: Any = msgspec.msgpack.Decoder(ToFront)
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self._pings = itertools.count()
        self._pinged: dict[int, float] = {}  # times of the pings that are not answered yet

    async def listen(self) -> None:
        """Returns when ranks can connect."""
        self._server = await asyncio.start_unix_server(self._serve, path=str(self.path))

    def close(self) -> None:
        if self._writer:
            self._writer.close()
        if self._server:
            self._server.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    @property
    def silent_s(self) -> float:
        """Seconds since the ranks were last heard of."""
        return time.monotonic() - self.heard_at

    @property
    def serving(self) -> bool:
        """Says whether the ranks take requests and have answered lately."""
        return self.alive and self.ready is not None and self.silent_s < max(FRESH_S, 2 * self.longest_step)

    def next_id(self) -> int:
        return next(self._ids)

    async def rows(self, submit: Submit) -> AsyncGenerator[Row, None]:
        """Submits a request, whose id is of `next_id`, and yields its rows; the last one has a finish reason. Closing
        the iterator ends the request. If ranks end before its first row, and are started again, the request is
        submitted to them again. Raises RequestRefused or EngineGone."""
        if not self.ready or not self._writer:
            raise EngineGone(self.reason or "the model is still loading")
        id, asked = submit.id, Asked(submit)
        self.asked[id] = asked
        finished = False
        try:
            self.send(submit)
            while not finished:
                row = await asked.rows.get()
                if isinstance(row, Exception):
                    finished = True
                    raise row
                finished = bool(row.finish)
                yield row
        finally:
            self.asked.pop(id, None)
            if not finished:
                self.send(Abort(id))

    def send(self, message: ChannelMessage) -> None:
        if self._writer:
            self._writer.write(framed(message))

    def watch(self, residency: bool) -> None:
        self.send(Watch(residency))

    def stop(self) -> None:
        """Asks the ranks to leave."""
        self.send(Stop())

    def lost(self, reason: str, again: bool) -> None:
        """The ranks have ended, `reason` says why. With `again`, they are started again, and requests without a row
        wait for them."""
        self.reason = reason
        for id, asked in list(self.asked.items()):
            if asked.begun or not again:
                del self.asked[id]
                asked.rows.put_nowait(EngineGone(reason))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer or not _is_own(writer.get_extra_info("socket")):  # only one rank 0 at a time
            writer.close()
            return
        self._writer, self.alive = writer, True
        self.gone.clear()
        pings = asyncio.create_task(self._ping())
        fault = ""
        try:
            while True:
                header = await reader.readexactly(HEADER.size)
                self._take(self._decoder.decode(await reader.readexactly(length_of(header))))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except OSError as error:
            fault = f"the connection to rank 0 is lost: {error.strerror}"
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            fault = f"a message of rank 0 cannot be read: {error}"
        finally:
            pings.cancel()
            self._writer, self.ready, self.alive, self.state = None, None, False, None
            self.reason = fault or self.reason or ENDED
            self.progress = Progress("starting", 0.0)
            self._pinged.clear()
            self.gone.set()
            writer.close()
            if not self.supervised:
                self.lost(self.reason, again=False)

    async def _ping(self) -> None:
        """Pings the ranks once they are ready; before that they do not answer."""
        while True:
            if self.ready:
                number = next(self._pings)
                self._pinged[number] = time.monotonic()
                self.send(Ping(number))
            await asyncio.sleep(PING_S)

    def _take(self, message: ChannelMessage) -> None:
        if isinstance(message, Out):
            self.heard_at = time.monotonic()
            for row in message.rows:
                if asked := self.asked.get(row.id):
                    asked.begun = True
                    asked.rows.put_nowait(row)
            return
        if isinstance(message, Refused):
            if asked := self.asked.get(message.id):
                asked.rows.put_nowait(RequestRefused(message.reason))
        elif isinstance(message, Ready):
            self.ready, self.heard_at, self.reason, self.longest_step = message, time.monotonic(), "", 0.0
            for asked in self.asked.values():  # of ranks that have ended
                self.send(asked.submit)
        elif isinstance(message, Progress):
            self.progress = message
        elif isinstance(message, State):
            self.state = message
        elif isinstance(message, Residency):
            self.residency = message
        elif isinstance(message, Pong):
            self.heard_at = time.monotonic()
            took = self.heard_at - self._pinged.pop(message.number, self.heard_at)
            self.longest_step = max(self.longest_step, took)
        elif isinstance(message, Fatal):
            self.reason = message.reason
        self.changed(message)


def _is_own(connection: socket.socket) -> bool:
    """Returns whether the process at the other end of a Unix socket belongs to this user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())
