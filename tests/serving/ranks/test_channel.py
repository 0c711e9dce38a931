"""The socket between the front and rank 0: frames, what is waiting, and what is said when an end is gone."""

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from umbra.base.errors import UserError
from umbra.executor.engine.schedule.request import SamplingParams
from umbra.serving.ranks import channel
from umbra.serving.ranks.channel import HEADER, Channel, framed
from umbra.serving.ranks.client import ENDED, EngineClient
from umbra.serving.ranks.messages import Abort, ChannelMessage, Out, Ping, Pong, Progress, Ready, Row, Stop, Submit

READY = Ready(416, 4, 96, 16, 50, 2, [0], 100.0)
COLD = msgspec.msgpack.encode({"type": "Submit", "id": 1, "ids": [2], "sampling": {"temperature": -1.0}})


def test_settings_that_are_left_out_do_not_travel() -> None:
    submit = Submit(1, [2], SamplingParams(7))
    assert msgspec.to_builtins(submit) == {"type": "Submit", "id": 1, "ids": [2], "sampling": {"max_tokens": 7}}


@dataclass
class Ends:
    """Rank 0's channel and the front's socket. In place of its process's end, the channel's status is in `left`."""

    left: list[int] = field(default_factory=list)

    def __enter__(self) -> "Ends":
        ours, self.front = socket.socketpair(socket.AF_UNIX)
        self.front.settimeout(10)
        self.channel = Channel(ours, self.left.append)
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.front.close()

    def received(self, number: int) -> list[Any]:
        messages: list[Any] = []
        while len(messages) < number:
            messages += self.channel.receive(10)
        return messages


@pytest.fixture
def orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 leaves as soon as its front has gone."""
    monkeypatch.setattr(channel, "ORPHAN_S", 0.0)


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_messages_in_both_directions() -> None:
    with Ends() as ends:
        assert ends.channel.receive(0) == ends.channel.receive(0.001) == []
        ends.front.sendall(framed(Ping(1)) + framed(Abort(2)))
        assert ends.received(2) == [Ping(1), Abort(2)]
        for message in (Pong(1, 2), Progress("loading", 0.5)):
            ends.channel.send(message)
        ends.channel.close()  # which sends what is waiting
        with ends.front.makefile("rb") as stream:
            assert stream.read() == framed(Pong(1, 2)) + framed(Progress("loading", 0.5))
    assert ends.left == []


def test_a_front_that_does_not_read_is_behind() -> None:
    with Ends() as ends:
        behind = [ends.channel.behind]
        for _ in range(channel.MOST_WAITING + 200):
            ends.channel.send(Progress("x" * 10_000, 0.5))
        assert [*behind, ends.channel.behind] == [False, True]
        ends.front.close()


@pytest.mark.parametrize(
    ("sent", "messages", "said"),
    [
        (framed(Stop()), [Stop(), None], ""),
        (framed(Ping(3)) + HEADER.pack(1 << 30), [Ping(3), None], "cannot be read: a message of 1073741824 bytes"),
        (HEADER.pack(len(COLD)) + COLD, [None], "cannot be read: temperature: -1.0 must be"),
    ],
)
def test_rank_0_leaves_when_its_front_is_gone(
    orphans: None, capsys: pytest.CaptureFixture[str], sent: bytes, messages: list[Any], said: str
) -> None:
    """Or cannot be understood: a message that is too large, for example."""
    with Ends() as ends:
        ends.front.sendall(sent)
        ends.front.shutdown(socket.SHUT_WR)
        assert ends.received(len(messages)) == messages
        wait_for(lambda: ends.left == [1])
    assert said in capsys.readouterr().out


def test_a_front_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="engine: the front that started these ranks does not answer: No such file"):
        Channel.connect(tmp_path / "engine")


def test_the_front_s_end_of_the_socket(tmp_path: Path) -> None:
    """It has one rank 0 at a time, and keeps what that says until it has left."""
    told: list[ChannelMessage] = []
    client = EngineClient(tmp_path / "engine", told.append)

    async def run() -> None:
        await client.listen()
        with pytest.raises(Exception, match="the model is still loading"):
            await anext(client.rows(Submit(0, [1], SamplingParams(3))))
        reader, writer = await asyncio.open_unix_connection(str(client.path))
        writer.write(framed(Progress("loading", 0.5)) + framed(READY))
        while client.ready is None:
            await asyncio.sleep(0)
        assert (client.alive, client.ready, client.progress) == (True, READY, Progress("loading", 0.5))
        second, _ = await asyncio.open_unix_connection(str(client.path))
        assert await second.read() == b""
        submit = Submit(0, [1, 2], SamplingParams(3), 7, b"salt", (1,))
        rows = client.rows(submit)
        first = asyncio.create_task(anext(rows))
        sent = framed(submit)
        assert await reader.readexactly(len(sent)) == sent
        writer.write(framed(Out(1, [Row(1, [9]), Row(0, [5])])))  # another's row first
        assert await first == Row(0, [5])
        await rows.aclose()
        assert await reader.readexactly(len(framed(Abort(0)))) == framed(Abort(0))
        writer.close()
        await client.gone.wait()
        client.close()
        assert not client.path.exists()

    asyncio.run(run())
    assert (client.alive, client.ready, client.reason) == (False, None, ENDED)
    assert told == [Progress("loading", 0.5), READY]
