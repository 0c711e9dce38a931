"""A stand-in for rank 0 and its engine: it speaks the same messages over the same kind of socket, from a script."""

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from umbra.executor.engine.schedule.request import TokenLogprob
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
    Row,
    Running,
    State,
    Stop,
    Submit,
    ToEngine,
    Watch,
)

HEADER = struct.Struct("<I")


@dataclass
class Entry:
    submit: Submit
    answer: list[int]  # all that it will say
    done: int = 0
    tokens: list[int] = field(default_factory=list)


class FakeEngine:
    """Answers each request with `answer(submit)`: token ids, after which it stops by an end-of-sequence token, unless
    `max_tokens` comes first; a string refuses the request with this reason. One step of `step_s` seconds gives each of
    at most `batch_size` running requests `width` tokens. A request begins after `prefill_s` seconds in which it runs.

    Tests read `submitted`, `aborted` and `running`, and call `die`.
    """

    def __init__(self, path: Path, answer: Callable[[Submit], Sequence[int] | str], **options: Any):
        self.path, self.answer = path, answer
        self.batch_size: int = options.get("batch_size", 4)
        self.longest: int = options.get("longest", 2000)
        self.vocabulary: int = options.get("vocabulary", 300)
        self.stop_ids: list[int] = options.get("stop_ids", [0])
        self.step_s: float = options.get("step_s", 0.001)
        self.prefill_s: float = options.get("prefill_s", 0.0)
        self.rate: float = options.get("rate", 1e6)
        self.width: int = options.get("width", 1)
        self.cached_tokens: int = options.get("cached_tokens", 0)
        self.submitted: list[Submit] = []
        self.aborted: list[int] = []
        self.watched: list[bool] = []  # what the front said about whether somebody watches
        self.waiting: list[Entry] = []
        self.running: list[Entry] = []
        self.stopped = False
        self.hung = False  # True: it answers nothing
        self.steps = 0
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    async def connect(self, ready: bool = True) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(str(self.path))
        self._tasks = [asyncio.create_task(self._read())]
        self.send(Progress("loading weights", 0.5))
        if ready:
            self.start()

    def start(self) -> None:
        """The model is loaded."""
        self.send(
            Ready(
                longest=self.longest,
                batch_size=self.batch_size,
                vocabulary=self.vocabulary,
                page_size=16,
                pages=64,
                groups=1,
                stop_ids=self.stop_ids,
                prefill_rate=self.rate,
            )
        )
        self._tasks.append(asyncio.create_task(self._steps()))

    def send(self, message: ChannelMessage) -> None:
        body = msgspec.msgpack.encode(message)
        self._writer.write(HEADER.pack(len(body)) + body)

    async def die(self, reason: str = "") -> None:
        """As a rank that is killed; with `reason`, as one that fails."""
        if reason:
            self.send(Fatal(reason))
        await self.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()

    @property
    def left(self) -> bool:
        """Returns whether the front has closed the connection."""
        return self._tasks[0].done()

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    async def _read(self) -> None:
        while True:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            message = self._decoder.decode(await self._reader.readexactly(size))
            if self.hung:
                continue
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Abort):
                self.aborted.append(message.id)
                self.waiting = [s for s in self.waiting if s.submit.id != message.id]
                self.running = [s for s in self.running if s.submit.id != message.id]
            elif isinstance(message, Ping):
                self.send(Pong(message.number, self.steps))
            elif isinstance(message, Watch):
                self.watched.append(message.residency)
            elif isinstance(message, Stop):
                self.stopped = True

    def _submit(self, submit: Submit) -> None:
        self.submitted.append(submit)
        answer = self.answer(submit)
        if isinstance(answer, str):
            self.send(Refused(submit.id, answer))
        else:
            ends = [] if submit.sampling.ignore_eos else self.stop_ids[:1]
            self.waiting.append(Entry(submit, [*answer, *ends]))

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        reported = 0.0
        while True:
            await asyncio.sleep(self.step_s)
            if self.hung:
                continue
            self.steps += 1
            while self.waiting and len(self.running) < self.batch_size:
                self.running.append(self.waiting.pop(0))
                self.running[-1].done = -int(self.prefill_s / self.step_s)
            rows = [self._row(s) for s in self.running]
            if nonempty := [row for row in rows if row]:
                self.send(Out(self.steps, nonempty))
            self.running = [s for s, row in zip(self.running, rows, strict=True) if not (row and row.finish)]
            if loop.time() - reported > 0.02:
                reported = loop.time()
                self.send(
                    State(
                        self.steps,
                        len(self.waiting),
                        [Running(s.submit.id, len(s.submit.ids), 0, len(s.tokens), 0, 0) for s in self.running],
                        [],
                        0,
                        prefill_rate=self.rate,
                    )
                )

    def _row(self, s: Entry) -> Row | None:
        sampling = s.submit.sampling
        if s.done < 0:
            s.done += 1
            return None
        new = s.answer[s.done : s.done + self.width][: sampling.max_tokens - s.done]
        first, s.done = s.done == 0, s.done + len(new)
        s.tokens += new
        finish = "length" if s.done >= sampling.max_tokens else ""
        if s.done >= len(s.answer):
            finish = "stop"
        prompt = s.submit.ids[1:] if first and sampling.prompt_logprobs is not None else []
        return Row(
            s.submit.id,
            new,
            finish,
            self.cached_tokens if first else 0,
            tuple(logprob(t, sampling.logprobs) for t in new) if sampling.logprobs is not None else (),
            tuple(logprob(t, sampling.prompt_logprobs or 0) for t in prompt),
        )


def logprob(token: int, top: int) -> TokenLogprob:
    """The more probable, the smaller its id."""
    return TokenLogprob(-token / 100, tuple((other, -other / 100) for other in range(65, 65 + top)))
