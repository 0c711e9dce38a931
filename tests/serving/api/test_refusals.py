"""What the system refuses while a server runs is told, instead of silence and tracebacks."""

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from serving.api import app
from serving.ranks.channel import Channel
from serving.ranks.messages import Progress
from tests.serving.api.front import serving


class Refusing:
    """A socket of which the system takes nothing."""

    def __init__(self, of: socket.socket):
        self.of = of

    def __getattr__(self, name: str) -> object:
        return getattr(self.of, name)

    def sendall(self, data: bytes) -> None:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))


def test_a_rank_that_cannot_send_learns_it_and_so_does_its_front(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        channel = Channel(tmp_path / "socket")
        front, _ = listener.accept()
        channel._socket = Refusing(channel._socket)  # type: ignore[assignment]
        channel.send(Progress("loading weights", 0.0))
        (first, *_) = channel.receive(10)
        assert isinstance(first, OSError)
        front.settimeout(10)
        assert front.recv(1) == b""
        channel.close()
        front.close()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_request_that_the_system_has_no_room_for(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refused(*of: object) -> None:
        raise error

    async def run() -> None:
        async with serving() as server:
            monkeypatch.setattr(app, "prepared", refused)
            reply = await server.complete()
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert "thread" in reply.error["message"] or "memory" in reply.error["message"]

    asyncio.run(run())
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert said.startswith("request ")


def test_a_front_that_cannot_send_to_its_rank_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving() as server:
            client = server.front.client
            assert client._writer
            client._writer.transport._fatal_error(OSError(errno.ENOBUFS, "No buffer space available"))  # type: ignore[attr-defined]
            await client.gone.wait()
            assert client.reason == "the connection to rank 0 is lost: No buffer space available"

    asyncio.run(run())
