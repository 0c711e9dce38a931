"""Messages over a Unix socket: each is a length of four bytes and that many bytes of msgpack. A closed socket is the
notice that the other side has ended."""

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from umbra.base.errors import UserError, refusal
from umbra.serving.ranks.messages import ChannelMessage, ToEngine

HEADER = struct.Struct("<I")
LARGEST = 64 << 20  # bytes of a message
ORPHAN_S = 5.0  # seconds after the end of the front in which rank 0 leaves by itself, or is ended
CLOSE_S = 2.0  # seconds to send what is waiting
MOST_WAITING = 1000  # messages that wait to be sent; while there are more, the front does not read

_encoder = msgspec.msgpack.Encoder()


def framed(message: ChannelMessage) -> bytes:
    """The bytes that stand for `message` on the socket."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """The number of bytes that follow a header."""
    (size,) = HEADER.unpack(header)
    if size > LARGEST:
        raise ValueError(f"a message of {size} bytes is larger than {LARGEST}")
    return int(size)


class Channel:
    """Rank 0's end of the socket. One thread reads and one writes, so that the engine's thread never waits for the
    front, unless it asks to. `leave` ends the process with a status."""

    def __init__(self, connection: socket.socket, leave: Callable[[int], object] = os._exit):
        self._socket, self._leave = connection, leave
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[ChannelMessage | None] = queue.SimpleQueue()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._closed = False
        self._failure: OSError | None = None  # why nothing can be sent to the API server
        threading.Thread(target=self._read, daemon=True, name="channel reader").start()
        self._writer = threading.Thread(target=self._write, daemon=True, name="channel writer")
        self._writer.start()

    @classmethod
    def connect(cls, path: Path) -> "Channel":
        """A channel to the front that listens at `path`."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError as error:
            raise UserError(f"{path}: the front that started these ranks does not answer: {error.strerror}") from None
        return cls(connection)

    def send(self, message: ChannelMessage) -> None:
        self._outbox.put(message)

    @property
    def behind(self) -> bool:
        """Says whether the API server is slow to read. Nothing that it can do without should then be sent."""
        return self._outbox.qsize() > MOST_WAITING

    def receive(self, wait_s: float) -> list[Any]:
        """All messages that have come. If there are none, waits up to `wait_s` seconds for one. None among them says
        that the front has ended, an OSError that nothing can be sent to it."""
        messages = []
        try:
            messages.append(self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait())
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def close(self) -> None:
        """Sends what is waiting and closes the socket."""
        self._outbox.put(None)
        self._writer.join(timeout=CLOSE_S)
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # the reading thread holds the socket open otherwise
        self._socket.close()

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while header := stream.read(HEADER.size):
                    self._inbox.put(self._decoder.decode(stream.read(length_of(header))))
        except (OSError, ValueError, RecursionError, struct.error, msgspec.MsgspecError, UserError) as error:
            if not self._closed:
                print(f"the front's messages cannot be read: {error}")
        self._inbox.put(None)
        time.sleep(ORPHAN_S)  # the engine's thread reads None and leaves, unless it hangs or still loads
        if not self._closed:
            if self._failure:
                os.write(2, f"error: {refusal(self._failure)}\n".encode())
            self._leave(1)

    def _write(self) -> None:
        try:
            while message := self._outbox.get():
                self._socket.sendall(framed(message))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the reader sees the end as well
        except OSError as error:  # the front is there, and would wait for ever
            self._failure = error
            self._inbox.put(error)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
