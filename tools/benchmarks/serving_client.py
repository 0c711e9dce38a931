"""A load generator for OpenAI-compatible servers: when each piece of each answer came, and figures over many answers.

Prompts are token ids, so that two servers read the same ones. Pieces are stamped when they are read and looked at when
all is over, so that the client takes little of a machine that it shares with the server.
"""

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from umbra.tools.benchmarks.output import Row

TTFT_SLO_S, TPOT_SLO_S = 2.0, 0.2  # a request that keeps both counts for the goodput
PATIENCE_S = 300.0


@dataclass(frozen=True)
class TimedCall:
    """A request; `at` is when it is sent, in seconds after the first, where that is fixed."""

    ids: list[int]
    tokens: int  # of the answer
    at: float = 0.0


@dataclass
class TimedAnswer:
    """Times are in seconds of time.perf_counter."""

    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # when each part of the body came
    error: str = ""
    times: list[float] = field(default_factory=list)  # of the chunks with tokens
    tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the server had in its cache
    text: str = ""

    def read(self) -> None:
        """Looks at the pieces; they are forgotten."""
        pending = b""
        for at, piece in self.pieces:
            pending += piece
            *events, pending = pending.split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    self._event(at, json.loads(event[6:]))
        self.pieces = []
        if not self.error and not (self.times and self.tokens):
            self.error = "the answer has no tokens"

    def _event(self, at: float, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"])
        if usage := event.get("usage"):
            self.tokens = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        for choice in event.get("choices", ()):
            if choice["text"]:
                self.times.append(at)
                self.text += choice["text"]

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(self.tokens - 1, 1)

    @property
    def in_time(self) -> bool:
        return not self.error and self.ttft <= TTFT_SLO_S and self.tpot <= TPOT_SLO_S


@dataclass(frozen=True)
class Client:
    """A client of the server at 127.0.0.1:`port`, whose API server is process `pid`."""

    port: int
    pid: int = 0

    async def get(self, path: str) -> tuple[int, str]:
        """-> status and body; 0: nobody listens"""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
            writer.close()
            return int(head.split()[1]), body
        except (OSError, IndexError):
            return 0, ""

    async def ask(self, call: TimedCall, answer: TimedAnswer | None = None) -> TimedAnswer:
        """Fills `answer`, if there is one to look at meanwhile."""
        answer = answer or TimedAnswer(time.perf_counter())
        try:
            await asyncio.wait_for(self._ask(call, answer), PATIENCE_S)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    async def _ask(self, call: TimedCall, answer: TimedAnswer) -> None:
        body = {"prompt": call.ids, "max_tokens": call.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            answer.sent = time.perf_counter()
            writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + data)
            lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            if lines[0].split()[1] != b"200":
                answer.error = f"{lines[0].decode()} {(await reader.read(300)).decode(errors='replace')}"
                return
            while size := int(await reader.readline(), 16):
                piece = await reader.readexactly(size + 2)
                answer.pieces.append((time.perf_counter(), piece[:-2]))
        finally:
            writer.close()

    async def streams(self, calls: Sequence[TimedCall], streams: int) -> list[TimedAnswer]:
        """A closed loop: `streams` requests at a time."""
        waiting, answers = iter(calls), list[TimedAnswer]()

        async def stream() -> None:
            for call in waiting:
                answers.append(await self.ask(call))

        await asyncio.gather(*(stream() for _ in range(streams)))
        return looked_at(answers)

    async def arrivals(self, calls: Iterable[TimedCall]) -> list[TimedAnswer]:
        """An open loop: each request is sent at its time, whatever has become of the others."""
        start = time.perf_counter()

        async def arrive(call: TimedCall) -> TimedAnswer:
            await asyncio.sleep(start + call.at - time.perf_counter())
            return await self.ask(call)

        return looked_at(await asyncio.gather(*(arrive(call) for call in calls)))


def looked_at(answers: list[TimedAnswer]) -> list[TimedAnswer]:
    for answer in answers:
        answer.read()
    return answers


def random_calls(
    seed: str, count: int, prompt: int, tokens: int, vocabulary: int, rate: float = 0.0
) -> list[TimedCall]:
    """`count` requests of random token ids; with a `rate`, at Poisson times."""
    choose, at = random.Random(seed), 0.0
    calls = []
    for _ in range(count):
        calls.append(TimedCall([choose.randrange(16, vocabulary) for _ in range(prompt)], tokens, at))
        at += choose.expovariate(rate) if rate else 0.0
    return calls


def share(values: Iterable[float], part: float) -> float:
    """The value below which `part` of `values` lies; not a number without values."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else math.nan


def figures(answers: Sequence[TimedAnswer]) -> Row:
    """Times in ms; rates over the time from the first request to the last token."""
    good = [answer for answer in answers if not answer.error]
    for error, count in Counter(answer.error[:200] for answer in answers if answer.error).most_common(3):
        print(f"{count} failed: {error}")
    gaps = [gap for answer in good for gap in answer.gaps]
    seconds = max(answer.times[-1] for answer in good) - min(answer.sent for answer in answers) if good else 0.0
    row: Row = {"sent": len(answers), "failed": len(answers) - len(good), "seconds": seconds}
    row["tokens_per_s"] = sum(answer.tokens for answer in good) / seconds if seconds else 0.0
    row["tokens_per_chunk"] = sum(a.tokens for a in good) / sum(len(a.times) for a in good) if good else 0.0
    for name, values in (("ttft", [a.ttft for a in good]), ("itl", gaps), ("tpot", [a.tpot for a in good])):
        for part in (50, 90, 99):
            row[f"{name}_p{part}"] = 1e3 * share(values, part / 100)
    in_time = sum(answer.in_time for answer in answers)
    row["goodput"] = in_time / seconds if seconds else 0.0
    row["in_time"] = in_time / len(answers)
    return row
