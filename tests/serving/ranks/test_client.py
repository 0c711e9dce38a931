"""The front's end of the socket to rank 0: what it makes of each message and of each end."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.ranks import client as module
from serving.ranks.channel import framed
from serving.ranks.client import ENDED, FRESH_S, PING_S, EngineClient, EngineGone, RequestRefused
from serving.ranks.messages import (
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
    Watch,
)
from tests.serving.clock import Clock

READY, STATE = Ready(416, 4, 96, 16, 50, 2, [0], 100.0), State(step=3, waiting=0, running=[], groups=[], preemptions=0)


class Told(EngineClient):
    """A client without a socket: what it sends is kept."""

    def __init__(self) -> None:
        self.told: list[Message] = []
        self.sent: list[Message] = []
        super().__init__(Path("/nowhere"), self.told.append)
        self._writer: Any = self

    def send(self, message: Message) -> None:
        self.sent.append(message)


def test_messages_are_kept_and_told() -> None:
    client, residency = Told(), Residency(1, 1, b"1", b"2")
    assert (client.progress, client.state, client.residency, client.reason) == (
        Progress("starting", 0.0),
        None,
        None,
        "",
    )
    assert (client.alive, client.ready, client.supervised, client.longest_step) == (False, None, False, 0.0)
    messages = [Progress("loading", 0.5), READY, STATE, residency, Fatal("the cup is empty"), Pong(1, 2)]
    for message in messages:
        client._take(message)
    assert client.told == messages
    assert (client.progress, client.state, client.residency) == (messages[0], STATE, residency)
    assert (client.ready, client.reason) == (READY, "the cup is empty")
    client._take(Out(1, []))
    assert client.told == messages  # rows are told to nobody else
    client.watch(True)
    client.stop()
    assert client.sent == [Watch(True), Stop()]


def test_ranks_serve_while_they_were_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, client = Clock(monkeypatch, module), Told()
    client._take(READY)
    assert not client.serving
    client.alive = True
    assert client.serving
    clock.now += FRESH_S
    assert client.silent_s == FRESH_S
    assert not client.serving
    client._take(Out(1, []))
    assert client.serving
    client._pinged = {4: clock.now - 30, 5: clock.now}
    client._take(Pong(4, 0))
    assert client.longest_step == 30
    client._take(Pong(5, 0))
    client._take(Pong(6, 0))  # nobody asked
    assert client.longest_step == 30
    clock.now += 59.9
    assert client.serving  # two of its longest steps
    clock.now += 0.1
    assert not client.serving
    client.reason = "of those before"
    client._take(READY)
    assert (client.longest_step, client.heard_at, client.reason) == (0.0, clock.now, "")
    client.ready = None
    assert not client.serving


def test_pings_begin_once_the_ranks_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, client, slept = Clock(monkeypatch, module), Told(), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds
        if len(slept) == 2:
            client.ready = READY
        if len(slept) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(client._ping())
    assert slept == [PING_S] * 4
    assert client.sent == [Ping(0), Ping(1)]
    assert client._pinged == {0: 1000 + 2 * PING_S, 1: 1000 + 3 * PING_S}


def asked(client: Told, answer: Callable[[int], None]) -> list[Row]:
    """The rows of a request, to which `answer` is called with its id once it is submitted."""

    async def run() -> list[Row]:
        found = []

        async def rows() -> None:
            async for row in client.rows([1, 2], Sampling(3), 7, b"salt"):
                found.append(row)

        task = asyncio.create_task(rows())
        await asyncio.sleep(0)
        answer(next(iter(client._asked), -1))
        try:
            await task
        finally:
            assert client.open_requests == 0
        return found

    return asyncio.run(run())


def test_a_request_gets_its_rows() -> None:
    client = Told()
    client._take(READY)
    rows = [Row(0, [5]), Row(0, [6], "stop")]

    def answer(id: int) -> None:
        assert client.open_requests == 1
        client._take(Out(1, [rows[0], Row(id + 1, [9])]))
        client._take(Refused(id + 1, "another's"))
        client._take(Out(2, [rows[1]]))

    assert asked(client, answer) == rows
    assert client.sent == [Submit(0, [1, 2], Sampling(3), 7, b"salt")]  # and no abort
    assert client.next_id() == 1


def test_a_request_that_is_refused_or_lost() -> None:
    client = Told()
    with pytest.raises(EngineGone, match="the model is still loading"):
        asked(client, lambda id: None)
    client.reason = "it broke"
    with pytest.raises(EngineGone, match="it broke"):
        asked(client, lambda id: None)
    client._take(READY)
    with pytest.raises(RequestRefused, match="too long"):
        asked(client, lambda id: client._take(Refused(id, "too long")))
    with pytest.raises(EngineGone, match="lost"):
        asked(client, lambda id: client.lost("lost", again=False))
    assert not any(isinstance(message, Abort) for message in client.sent)
    assert client.reason == "lost"


def test_a_request_without_a_row_waits_for_the_next_ranks() -> None:
    client = Told()
    client._take(READY)

    def answer(id: int) -> None:
        client.lost("lost", again=True)
        assert client.open_requests == 1
        client._take(READY)
        client._take(Out(1, [Row(id, [4], "length")]))

    assert asked(client, answer) == [Row(0, [4], "length")]
    assert client.sent == [Submit(0, [1, 2], Sampling(3), 7, b"salt")] * 2

    def begun(id: int) -> None:
        client._take(Out(1, [Row(id, [4])]))
        client.lost("lost again", again=True)

    with pytest.raises(EngineGone, match="lost again"):
        asked(client, begun)


def test_a_request_that_is_closed_is_aborted() -> None:
    client = Told()
    client._take(READY)

    async def run() -> None:
        rows = client.rows([1], Sampling(3), id=41)
        waiting = asyncio.create_task(anext(rows))
        await asyncio.sleep(0)
        client._take(Out(1, [Row(41, [4])]))
        await waiting
        await rows.aclose()

    asyncio.run(run())
    assert client.sent == [Submit(41, [1], Sampling(3), 0, b""), Abort(41)]


ENDS: list[tuple[Any, str]] = [
    (asyncio.IncompleteReadError(b"", 4), ENDED),
    (ConnectionResetError(), ENDED),
    (OSError(5, "I/O error"), "the connection to rank 0 is lost: I/O error"),
    (ValueError("a length of 2^40"), "a message of rank 0 cannot be read: a length of 2^40"),
]


@pytest.mark.parametrize(("end", "reason"), ENDS)
@pytest.mark.parametrize("supervised", [False, True])
def test_the_end_of_a_connection(
    monkeypatch: pytest.MonkeyPatch, end: Exception, reason: str, supervised: bool
) -> None:
    """Nothing of it is left, and who supervises tells requests why."""
    client, closed = Told(), list[bool]()
    client._writer, client.supervised = None, supervised
    monkeypatch.setattr(module, "_is_own", lambda connection: True)
    writer: Any = SimpleNamespace(close=lambda: closed.append(True), get_extra_info=lambda name: None)

    async def readexactly(size: int) -> bytes:
        assert (client._writer, client.alive, client.gone.is_set()) == (writer, True, False)
        client.ready, client.state, client.progress = READY, STATE, Progress("x", 1.0)
        client._pinged[3] = 4.0
        raise end

    losses: list[tuple[str, bool]] = []
    monkeypatch.setattr(client, "lost", lambda reason, again: losses.append((reason, again)))
    asyncio.run(client._serve(SimpleNamespace(readexactly=readexactly), writer))  # type: ignore[arg-type]
    assert (client._writer, client.ready, client.alive, client.state) == (None, None, False, None)
    assert (client.reason, client.progress, client._pinged) == (reason, Progress("starting", 0.0), {})
    assert client.gone.is_set()
    assert closed == [True]
    assert losses == ([] if supervised else [(reason, False)])


def test_one_rank_0_at_a_time_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for own, taken in ((False, None), (True, object())):
        client, closed = Told(), list[bool]()
        client._writer = taken
        monkeypatch.setattr(module, "_is_own", lambda connection, own=own: own)
        writer: Any = SimpleNamespace(close=lambda closed=closed: closed.append(True), get_extra_info=lambda name: None)
        asyncio.run(client._serve(None, writer))  # type: ignore[arg-type]
        assert closed == [True]
        assert client._writer is taken
        assert not client.alive


def test_a_socket_is_there_while_it_is_listened_on(tmp_path: Path) -> None:
    """A rank that connects is known at once; what it says before it is closed is taken, and answered in frames."""
    client = EngineClient(tmp_path / "engine")
    assert (client.heard_at, client.open_requests) == (0.0, 0)

    async def run() -> bytes:
        await client.listen()
        reader, writer = await asyncio.open_unix_connection(str(client.path))
        client.gone.set()
        writer.write(framed(Progress("loading", 0.5)) + framed(READY) + framed(STATE))
        while client.state is None:
            await asyncio.sleep(0)
        assert (client.alive, client.ready, client.progress) == (True, READY, Progress("loading", 0.5))
        assert not client.gone.is_set()
        client.watch(True)
        client.stop()
        said = await reader.readexactly(len(framed(Watch(True)) + framed(Stop())))
        client.close()
        assert not client.path.exists()
        assert await reader.read() == b""
        await client.gone.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1  # nobody pings any more
        with pytest.raises((FileNotFoundError, ConnectionRefusedError)):
            await asyncio.open_unix_connection(str(client.path))
        writer.close()
        return said

    assert asyncio.run(run()) == framed(Watch(True)) + framed(Stop())
    assert (client.alive, client.ready, client.reason) == (False, None, ENDED)
    client.close()  # once more does nothing
    client.send(Stop())


def test_sockets_are_closed_even_if_their_names_stay(tmp_path: Path) -> None:
    client = EngineClient(tmp_path / "engine")

    async def run() -> None:
        await client.listen()
        assert client._server
        assert client._server.is_serving()
        client.close()
        assert not client._server.is_serving()

    asyncio.run(run())


def test_requests_that_are_lost_are_forgotten() -> None:
    client = Told()
    client._take(READY)

    async def run() -> None:
        waiting = [asyncio.create_task(anext(client.rows([1], Sampling(3)))) for _ in range(2)]
        await asyncio.sleep(0)
        client._asked[0].begun = True
        client.lost("first", again=True)
        assert [*client._asked] == [1]
        client.lost("second", again=False)
        assert client.open_requests == 0
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(error) for error in found] == ["first", "second"]
        assert {type(error) for error in found} == {EngineGone}

    asyncio.run(run())


def test_answers_to_pings_tell_how_long_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, client = Clock(monkeypatch, module), Told()
    client._take(READY)
    client._pinged = {1: 990.0, 2: 997.0}
    clock.now = 1001.0
    client._take(Pong(2, 0))
    assert (client.longest_step, client.heard_at, client._pinged) == (4.0, 1001.0, {1: 990.0})
    clock.now = 1002.0
    client._take(Pong(1, 0))
    assert (client.longest_step, client.heard_at, client._pinged) == (12.0, 1002.0, {})
    clock.now = 1003.0
    client._take(Pong(9, 0))  # nobody has asked
    assert (client.longest_step, client.heard_at) == (12.0, 1003.0)
    clock.now = 1004.0
    client._take(Out(1, []))
    assert client.heard_at == 1004.0
    client._take(READY)
    assert client.longest_step == 0.0


def test_processes_of_this_user_are_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert module._is_own(one) is True
        monkeypatch.setattr(module, "os", SimpleNamespace(getuid=lambda: os.getuid() + 1))
        assert module._is_own(one) is False
