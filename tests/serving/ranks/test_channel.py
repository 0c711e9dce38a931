"""How messages reach rank 0, and ticks all ranks: frames, what is waiting, and what is said when the front is gone."""

import io
import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from serving.ranks import channel as module
from serving.ranks import ticks
from serving.ranks.channel import HEADER, Channel, framed, length_of
from serving.ranks.messages import Abort, Ping, Pong, Progress, Sampling, Stop, Submit, Tick, ToEngine
from serving.ranks.ticks import Control
from umbra.errors import UserError


def test_a_frame_is_a_length_and_that_many_bytes() -> None:
    frame = framed(Stop())
    assert frame == b"\x0b\0\0\0" + frame[4:]
    assert len(frame) == 4 + 11
    assert length_of(frame[:4]) == 11
    assert length_of(HEADER.pack(64 * 1024**2)) == 64 * 1024**2
    with pytest.raises(ValueError, match="a message of 67108865 bytes is larger than 67108864"):
        length_of(HEADER.pack(64 * 1024**2 + 1))


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Channel, socket.socket]]:
    """Rank 0's end, and the front's. The process does not end with it."""
    monkeypatch.setattr(module, "os", SimpleNamespace(_exit=lambda status: None, write=os.write))
    monkeypatch.setattr(module, "ORPHAN_S", 0.0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "engine"))
        listener.listen()
        ours = Channel(tmp_path / "engine")
        theirs, _ = listener.accept()
        theirs.settimeout(10)
        yield ours, theirs
        ours.close()
        theirs.close()


def test_messages_in_both_directions(ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    threads = [thread for thread in threading.enumerate() if thread.name in ("channel reader", "channel writer")]
    assert len(threads) >= 2
    assert all(thread.daemon for thread in threads)  # the engine's end ends them
    assert (ours._closed, ours._failure) == (False, None)
    assert ours.receive(0) == []
    assert ours.receive(0.001) == []
    theirs.sendall(framed(Ping(1)) + framed(Abort(2)))
    found = ours.receive(10)
    while len(found) < 2:
        found += ours.receive(10)
    assert found == [Ping(1), Abort(2)]
    ours.send(Pong(1, 2))
    ours.send(Progress("loading", 0.5))
    wanted = framed(Pong(1, 2)) + framed(Progress("loading", 0.5))
    ours.close()  # which sends what is waiting
    found_bytes = b""
    while data := theirs.recv(1000):
        found_bytes += data
    assert found_bytes == wanted


def test_the_end_of_the_front_is_a_message(ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(framed(Stop()))
    theirs.close()
    found = ours.receive(10)
    while len(found) < 2:
        found += ours.receive(10)
    assert found == [Stop(), None]


def test_a_front_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="engine: the front that started these ranks does not answer: No such file"):
        Channel(tmp_path / "engine")


class Socket:
    """One that gives `data`, and refuses what it is sent with `error`."""

    def __init__(self, data: bytes = b"", error: OSError | None = None):
        self.data, self.error, self.sent, self.shut = data, error, list[bytes](), list[int]()

    def makefile(self, mode: str) -> Any:
        assert mode == "rb"
        return io.BytesIO(self.data)

    def sendall(self, data: bytes) -> None:
        if self.error:
            raise self.error
        self.sent.append(data)

    def shutdown(self, how: int) -> None:
        self.shut.append(how)


def parts(*waiting: Any, **more: Any) -> Any:
    """A channel without threads."""
    made: Any = Channel.__new__(Channel)
    made._socket, made._closed, made._failure = Socket(**more), False, None
    made._inbox, made._outbox = queue.SimpleQueue(), queue.SimpleQueue()
    made._decoder = msgspec.msgpack.Decoder(ToEngine)
    for message in waiting:
        made._outbox.put(message)
    return made


def test_a_front_that_does_not_read_is_behind() -> None:
    assert parts(*[Stop()] * 1000).behind is False
    assert parts(*[Stop()] * 1001).behind is True


def test_what_is_waiting_is_sent_up_to_the_end() -> None:
    made = parts(Pong(1, 2), Stop(), None, Stop())
    made._write()
    assert made._socket.sent == [framed(Pong(1, 2)), framed(Stop())]
    assert (made._failure, made._socket.shut, made._inbox.qsize()) == (None, [], 0)


@pytest.mark.parametrize("error", [BrokenPipeError(), ConnectionResetError()])
def test_a_front_that_is_gone_is_no_failure(error: OSError) -> None:
    made = parts(Stop(), error=error)
    made._write()
    assert (made._failure, made._socket.shut, made._inbox.qsize()) == (None, [], 0)


def test_a_system_that_sends_nothing_is_a_failure() -> None:
    error = OSError(105, "No buffer space available")
    made = parts(Stop(), error=error)
    made._write()
    assert made._failure is error
    assert made._inbox.get_nowait() is error
    assert made._socket.shut == [socket.SHUT_RDWR]


@pytest.mark.parametrize(("closed", "failure"), [(False, False), (False, True), (True, False)])
def test_rank_0_leaves_when_its_front_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed: bool, failure: bool
) -> None:
    """After a while in which the engine may leave; it says what it could not tell."""
    done: list[Any] = []
    system = SimpleNamespace(write=lambda *of: done.append(of), _exit=lambda status: done.append(status))
    monkeypatch.setattr(module, "os", system)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: done.append(seconds)))
    made = parts(data=framed(Ping(3)) + HEADER.pack(1 << 30))
    made._closed = closed
    made._failure = OSError(105, "No buffer space available") if failure else None
    made._read()
    assert [made._inbox.get_nowait() for _ in range(2)] == [Ping(3), None]
    said = capsys.readouterr().out
    assert said.startswith("the front's messages cannot be read: a message of") == (not closed)
    assert done[0] == module.ORPHAN_S
    if closed:
        assert done[1:] == []
        return
    assert done[-1] == 1
    assert len(done) == 2 + failure
    if failure:
        number, line = done[1]
        assert number == 2
        assert line.startswith(b"error: ")
        assert line.endswith(b"\n")
        assert b"No buffer space available" in line


class Group:
    """Broadcasts of several ranks that run one after the other: what rank 0 sends is kept for the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.sent: list[torch.Tensor] = []
        self.rank, self.received = 0, 0

        def new_group(backend: str, timeout: Any) -> str:
            self.made.append((backend, timeout.total_seconds()))
            return "group"

        def broadcast(buffer: torch.Tensor, src: int, group: str) -> None:
            assert (src, group, buffer.dtype) == (0, "group", torch.uint8)
            if self.rank == 0:
                self.sent.append(buffer.clone())
            else:
                assert not buffer.any()
                buffer.copy_(self.sent[self.received])
                self.received += 1

        monkeypatch.setattr(ticks, "dist", SimpleNamespace(new_group=new_group, broadcast=broadcast))


def test_one_rank_shares_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    alone = Control(0, 1, 60)
    tick = Tick(1, 2, 3, 4, [Stop()])
    assert alone.alone
    assert alone.share(tick) is tick
    assert alone.number(7) == 7
    assert (group.made, group.sent) == ([], [])


@pytest.mark.parametrize("tokens", [1, 4040, 4050, 4060, 4070, 4080, 4090, 4100, 9000])
def test_a_tick_of_any_length_reaches_every_rank(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Short ones in one broadcast, whose length is always the same."""
    group = Group(monkeypatch)
    first, other = Control(0, 2, 60), Control(1, 2, 60)
    assert group.made == [("gloo", 60.0)] * 2
    assert not first.alone
    tick = Tick(1, 2, None, 4, [Submit(1, [5] * tokens, Sampling(3)), Abort(4)])
    size = len(module._encoder.encode(tick))
    assert first.share(tick) == tick
    rest = size + 4 - 4096
    assert [len(sent) for sent in group.sent] == [4096, rest][: 1 + (rest > 0)]
    group.rank = 1
    assert other.share(None) == tick
    assert group.received == len(group.sent)


def test_rank_0_s_number_is_every_rank_s(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    first, other = Control(0, 2, 60), Control(1, 2, 60)
    assert first.number(5) == 5
    group.rank = 1
    assert other.number(9) == 5
    sent = msgspec.msgpack.decode(group.sent[0].numpy().tobytes()[4:][: group.sent[0][0]], type=Tick)
    assert sent == Tick(5, 0, None, 0, [])


def test_a_wait_is_for_the_first_message_alone() -> None:
    made, waited = parts(), list[Any]()
    given = [Ping(1), Ping(2)]

    def get(timeout: float | None = None) -> Any:
        waited.append(timeout)
        if not given:
            raise queue.Empty
        return given.pop(0)

    made._inbox = SimpleNamespace(get=get, get_nowait=get)
    assert made.receive(2.5) == [Ping(1), Ping(2)]
    assert waited == [2.5, None, None]
    waited.clear()
    given.append(Ping(3))
    assert made.receive(0) == [Ping(3)]
    assert waited == [None, None]
    assert made.receive(1.0) == []


def test_a_channel_is_closed_when_what_is_waiting_is_sent() -> None:
    made, done = parts(Stop()), list[Any]()
    made._writer = SimpleNamespace(join=lambda timeout: done.append(("join", timeout, made._closed)))

    def shutdown(how: int) -> None:
        done.append(("shutdown", how, made._closed))
        raise OSError

    made._socket = SimpleNamespace(shutdown=shutdown, close=lambda: done.append("close"))
    made.close()
    assert done == [("join", module.CLOSE_S, False), ("shutdown", socket.SHUT_RDWR, True), "close"]
    assert [made._outbox.get_nowait() for _ in range(2)] == [Stop(), None]
