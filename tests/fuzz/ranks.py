"""What processes of ours tell each other: messages between front and ranks, and the errors that ranks leave."""

import asyncio
import contextlib
import io
import logging
import socket
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from executor.engine.request import SamplingParams
from executor.launch.causes import cause_of
from serving.api.live import Live
from serving.api.metrics import Metrics
from serving.ranks.channel import framed
from serving.ranks.client import EngineClient
from serving.ranks.messages import (
    Fatal,
    Group,
    Message,
    Out,
    Pong,
    Progress,
    Ready,
    Refused,
    Residency,
    Row,
    Running,
    Sampling,
    State,
    Submit,
    ToEngine,
    TokenLogprob,
    TopToken,
)
from serving.ranks.worker import request_of
from tests.fuzz.target import Target

READY = Ready(longest=9, batch_size=1, vocabulary=300, page_size=16, pages=1, groups=1, stop_ids=[0], prefill_rate=1.0)
RUNNING = Running(id=1, prompt=2, num_computed=3, generated=4, longest=9, preemptions=0)
ROW = Row(1, [5, 6], "stop", logprobs=[TokenLogprob(-1.0, [TopToken(5, -1.0)])])
STATE = State(1, 1, [RUNNING], [Group(1, 2, 3)], 0, drafted=5, expert_hits=7, queue=[RUNNING], step_tokens=[4, 5])


class Writer:
    def __init__(self, connection: socket.socket):
        self.connection = connection

    def get_extra_info(self, name: str) -> socket.socket:
        return self.connection

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


def to_front(folder: Path) -> Target:
    """Whatever comes from rank 0: the front reads it, or says that it cannot and takes the ranks for lost."""
    loop = asyncio.new_event_loop()
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    metrics = Metrics("m")  # of all inputs: it takes ten times as long to make as to use

    async def serve(data: bytes) -> None:
        taken: list[Message] = []

        def take(message: Message) -> None:
            metrics.take(message)
            live.take(message)
            taken.append(message)

        reader = asyncio.StreamReader()
        client = EngineClient(folder / "none")
        live = Live(client, metrics, dict)
        client.changed = take
        reader.feed_data(data)
        reader.feed_eof()
        await client._serve(reader, Writer(ours))  # type: ignore[arg-type]
        assert not client.alive
        live._state()
        if taken:
            metrics.text({})

    def run(data: bytes) -> None:
        loop.run_until_complete(serve(data))
        assert theirs

    messages: list[Any] = [
        READY,
        Out(1, [ROW]),
        STATE,
        Refused(1, "why"),
        Pong(1, 2),
        Progress("loading", 0.5),
        Fatal("why"),
        Residency(1, 8, b"\1", bytes(8)),
    ]
    return Target(run, [*map(framed, messages), framed(READY) + framed(STATE) + framed(STATE)], json=False)


def to_ranks(folder: Path) -> Target:
    """What the front sends: a request that no front of ours would make is refused in one line."""
    decoder = msgspec.msgpack.Decoder(ToEngine)

    def run(data: bytes) -> None:
        try:
            message = decoder.decode(data)
        except (ValueError, RecursionError, msgspec.MsgspecError):  # as Channel catches
            return
        if isinstance(message, Submit):
            assert isinstance(request_of(message).sampling, SamplingParams)

    sampling = Sampling(9, 0.5, 5, seed=7, logit_bias={1: 2.0}, stop_token_ids=(3,), logprobs=2)
    messages = [Submit(1, [1, 2], sampling, 3, b"s"), Submit(1, [1], Sampling(1))]
    return Target(run, [msgspec.msgpack.encode(message) for message in messages], json=False)


def failure(folder: Path) -> Target:
    """The error file of a rank, which the launcher prints."""

    def run(data: bytes) -> None:
        (folder / "error.json").write_bytes(data)
        for status in (1, 2, -9):
            logging.disable(logging.ERROR)  # as the launcher does
            try:
                failed = ProcessFailure(0, 1, status, str(folder / "error.json"))
                error = ChildFailedError("rank", {0: failed})
            except Exception:  # torchrun's own reader: no rank writes such files
                return
            finally:
                logging.disable(logging.NOTSET)
            with contextlib.redirect_stderr(io.StringIO()):
                text = cause_of(error.failures, folder, {}).text
            assert text
            assert "\n" not in text

    stack = "Traceback (most recent call last):\\n  File x\\nValueError: why"
    extra = f'{{"py_callstack": "{stack}", "timestamp": "1700000000"}}'
    seeds = [f'{{"message": {{"message": "why", "extraInfo": {extra}}}}}', '{"message": "why", "timestamp": 5}']
    return Target(run, [seed.encode() for seed in seeds])
