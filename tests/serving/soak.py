"""A soak of a whole server: random requests, clients that are killed, wrong requests, long prompts, a rank that is
killed, and one that is halted for a while.

    .venv/bin/python -m tests.serving.soak [--minutes 15] [--clients 8] [--ranks 1] [--set KEY=VALUE ...]

The demo's experts, the requests and their prefixes share an arena too small for all of them. Every request must be
answered, or told why not: what is neither is printed, and ends the soak with status 1. At the end nothing may be held,
memory must be flat, and the server must leave when it is asked to. Times are judged unless `--no-times` is given: on a
busy machine they say nothing.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errors import collect_seldom
from executor.serving.client import FRESH_S
from tests.serving.front import Connection
from tests.serving.test_server import Process, server

LONGEST = 2000  # tokens of a prompt; the demo's model has 2,048 positions
NEW = 48  # tokens of an answer to such a prompt
ARENA_MB = 8  # all experts and the pages of a full batch take twice as much
PAUSE_MS = 2  # of running requests while prompts are prefilled; a step of the demo takes about 1
THREADS = 1  # of a rank: front and clients need the other core of two
VOCABULARY = range(16, 4000)  # ids of the demo's vocabulary that are neither special nor at its end
KILLED, TOO_LONG, BROKEN, STREAMED, FOLLOWED = 0.3, 0.1, 0.05, 0.7, 0.05  # shares of the requests
FLAGS = {"type": "array", "items": {"type": "boolean"}}
GRAMMARS = [{"guided_regex": "(yes|no)( (yes|no)){3}"}, {"guided_json": FLAGS}]
BROKEN_GRAMMARS = [{"guided_regex": "(" * 5}, {"guided_grammar": "start"}, {"guided_json": {"type": "king"}}]
LOST_S = 180.0  # a request that takes longer is lost
RETRY_S = 1.0  # pause of a client that was told that the server does not serve
EVERY_S = 60.0  # between two long prompts
LONG_S = 240.0  # only a soak that takes this long halts a rank: it takes a while until that is told
TOLD = {429: {"queue_full", "too_slow"}, 500: {"engine_gone"}, 503: {"engine_gone", "loading", "queue_timeout"}}
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6
SETTLED = 3 / 8  # the last part of a soak, in which the ranks are back and memory should be flat
GROWTH = 1.1  # most growth of memory in that part, on top of the allocator's slack
SLACK_MB = 16.0
ALIVE_S, DEAD_S = 1.0, 1.0  # most seconds until /health answers, and until /health/ready tells of a death
STUCK_S = 5.0  # most seconds that /health/ready may take for a halted rank, beyond those in which an answer is fresh
SPREAD = 5.0  # most that the 99th percentile of the gaps between two tokens may be of the median


def share(values: list[float], part: float) -> float:
    """The value below which `part` of `values` lies; 0 without values."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0


@dataclass
class Found:
    """What the clients and the watcher have seen."""

    ends: Counter[str] = field(default_factory=Counter)  # how requests ended
    lost: list[str] = field(default_factory=list)  # what must not happen
    gaps: list[float] = field(default_factory=list)  # seconds between two chunks of an answer
    first: list[float] = field(default_factory=list)  # seconds to the first chunk
    health: list[tuple[float, float]] = field(default_factory=list)  # seconds that /health took, and when
    told_of_death: float | None = None  # seconds from a rank's death until /health/ready said so
    back: float | None = None  # seconds until the ranks served again
    told_of_halt: float | None = None  # seconds from a rank's halt until /health/ready said so; None: none was halted
    memory: list[tuple[float, float, float]] = field(default_factory=list)  # time, MB of the front, MB of the ranks
    at_end: dict[str, float] = field(default_factory=dict)  # gauges of /metrics when nobody asked for anything


class Soak:
    """Of a server that serves. `seed` makes the requests, but not their order in time."""

    def __init__(self, running: Process, seconds: float, seed: int):
        self.running, self.seconds = running, seconds
        self.random = random.Random(seed)
        self.found = Found()
        self.start = time.monotonic()
        self.killed_at: float | None = None

    async def run(self, clients: int) -> Found:
        tasks = [self._client() for _ in range(clients)]
        watcher = asyncio.create_task(self._watch())
        await asyncio.gather(*tasks, self._long_prompts(), self._faults())
        watcher.cancel()
        await self._quiet()
        return self.found

    @property
    def over(self) -> bool:
        return time.monotonic() > self.start + self.seconds

    async def _client(self) -> None:
        while not self.over:
            end = await self._request(*self._wanted())
            await asyncio.sleep(self.random.expovariate(2.0) + (RETRY_S if "503" in end else 0.0))

    async def _long_prompts(self) -> None:
        while not self.over:
            body = {"prompt": self._prompt(LONGEST), "max_tokens": NEW, "stream": True, "ignore_eos": True}
            await self._request("long", "/v1/completions", body)
            await asyncio.sleep(min(EVERY_S, self.seconds / 3))

    async def _faults(self) -> None:
        """Halts a rank after a quarter of the time, if that is long enough, and kills one after half of it."""
        await asyncio.sleep(self.seconds / 4)
        if self.seconds >= LONG_S:
            os.kill(victim := self._victim(), signal.SIGSTOP)
            self.found.told_of_halt = await self._until_ready(False)
            os.kill(victim, signal.SIGCONT)
            await self._until_ready(True)
        await asyncio.sleep(max(0.0, self.start + self.seconds / 2 - time.monotonic()))
        os.kill(self._victim(), signal.SIGKILL)
        self.killed_at = time.monotonic()
        self.found.told_of_death = await self._until_ready(False)
        await self._until_ready(True)
        self.found.back = time.monotonic() - self.killed_at

    def _victim(self) -> int:
        return self.random.choice([pid for pid in self.running.ranks() if b"serving.worker" in command(pid)])

    async def _until_ready(self, ready: bool) -> float:
        """-> seconds until /health/ready says that the server is, or is not, ready"""
        start = time.monotonic()
        while ((await self._get("/health/ready"))[0] == 200) != ready:
            if time.monotonic() > start + LOST_S:
                self.found.lost.append(f"{LOST_S:g} s after a fault, /health/ready still says the opposite")
                break
            await asyncio.sleep(0.01)
        return time.monotonic() - start

    async def _watch(self) -> None:
        while True:
            sent = time.monotonic()
            await self._get("/health")
            self.found.health.append((time.monotonic() - sent, sent - self.start))
            pids = self.running.ranks()
            ranks = sum(resident_mb(pid) for pid in pids if b"serving.worker" in command(pid))
            self.found.memory.append((sent - self.start, resident_mb(self.running.process.pid), ranks))
            await asyncio.sleep(1.0)

    async def _quiet(self) -> None:
        """Waits until nothing is held, for a few seconds: clients that were killed are noticed a moment later."""
        for _ in range(100):
            status, body = await self._get("/metrics")
            pattern = r"^umbra:(kv_cache_usage_perc|num_requests_running|num_requests_waiting)\{.*\} (\S+)$"
            self.found.at_end = {name: float(value) for name, value in re.findall(pattern, body.decode(), re.M)}
            if status != 200 or not any(self.found.at_end.values()):
                return
            await asyncio.sleep(0.1)
        self.found.lost.append(f"something is held at the end: {self.found.at_end}")

    def _prompt(self, tokens: int) -> list[int]:
        return self.random.choices(VOCABULARY, k=tokens)

    def _wanted(self) -> tuple[str, str, dict[str, Any]]:
        """A random request: what is expected of it, its path and body."""
        choose = self.random
        kind = choose.choices(
            ["killed", "too long", "broken", "grammar", "whole"],
            [KILLED, TOO_LONG, BROKEN, FOLLOWED, 1 - KILLED - TOO_LONG - BROKEN - FOLLOWED],
        )[0]
        body: dict[str, Any] = {
            "max_tokens": int(2 ** choose.uniform(0, 6.5)), "temperature": choose.choice([0, 0.7, 1.0]),
            "stream": choose.random() < STREAMED,
        }  # fmt: skip
        if kind == "too long":
            return kind, "/v1/completions", body | {"prompt": self._prompt(choose.randint(LONGEST + NEW, 4 * LONGEST))}
        body |= choose.choice([{}, {}, {"seed": choose.randrange(99)}, {"n": 2, "temperature": 1.0}, {"stop": ["the"]}])
        if kind in ("broken", "grammar"):
            body |= choose.choice(BROKEN_GRAMMARS if kind == "broken" else GRAMMARS)
        elif choose.random() < 0.2:
            body["ignore_eos"] = True
        if choose.random() < 0.3:
            turns = choose.choice(["Do you like dancing?", "Is he married or single?", "Hi. " * choose.randint(1, 50)])
            return kind, "/v1/chat/completions", body | {"messages": [{"role": "user", "content": turns}]}
        return kind, "/v1/completions", body | {"prompt": self._prompt(int(2 ** choose.uniform(0, 9)))}

    async def _request(self, kind: str, path: str, body: dict[str, Any]) -> str:
        """Sends one request, and records how it ended, or that it was lost. -> how it ended"""
        connection: Connection | None = None
        end = "lost"
        try:
            connection = await asyncio.wait_for(self.running.open(path, body), LOST_S)
            patience = self.random.expovariate(1.5)
            if kind != "killed":
                end = await asyncio.wait_for(self._answer(connection, kind, body), LOST_S)
            else:  # within a second or so, wherever the request is then
                try:
                    end = await asyncio.wait_for(self._answer(connection, kind, body), patience)
                    end = f"killed late, {end}"
                except asyncio.TimeoutError:
                    end = "killed"
        except asyncio.TimeoutError:
            self._lose(kind, path, body, f"nothing was heard for {LOST_S:g} s")
        except (OSError, asyncio.IncompleteReadError, ValueError, KeyError, IndexError, AssertionError) as error:
            self._lose(kind, path, body, f"{type(error).__name__}: {error}")
        finally:
            if connection:
                connection.kill()
        self.found.ends[end] += 1
        return end

    def _lose(self, kind: str, path: str, body: dict[str, Any], why: str) -> None:
        at = time.monotonic() - self.start
        self.found.lost.append(f"{at:.1f} s, {kind}: POST {path} {json.dumps(body)[:300]}: {why}")

    async def _answer(self, connection: Connection, kind: str, body: dict[str, Any]) -> str:
        """-> how the request ended. Raises AssertionError if that was wrong."""
        sent = time.monotonic()
        reply = await connection.head()
        if reply.status != 200 or not body["stream"]:
            reply.body = await connection.reader.readexactly(int(reply.headers["content-length"]))
        assert reply.status != 200 or kind not in ("too long", "broken"), "a wrong request is answered"
        if reply.status == 400:
            assert kind in ("too long", "broken"), reply.body
            assert reply.error["code"] != "context_length_exceeded" or kind == "too long", reply.body
            return f"400 {kind}"
        if reply.status != 200:
            code = reply.error["code"]
            assert code in TOLD.get(reply.status, ()), reply.body
            assert reply.status == 429 or code == "queue_timeout" or self._died(), reply.body
            assert reply.status != 429 or int(reply.headers["retry-after"]) > 0, reply.headers
            return f"{reply.status} {code}"
        if not body["stream"]:
            assert all(choice["finish_reason"] for choice in reply.json["choices"]), reply.body
            assert len(reply.json["choices"]) == body.get("n", 1), reply.body
            assert 0 < reply.json["usage"]["completion_tokens"] <= body["max_tokens"] * body.get("n", 1), reply.body
            return "answered"
        last = None
        while data := await connection.chunk():
            now = time.monotonic()
            if data.startswith(b"data: {") and b'"finish_reason":null' in data and "n" not in body:
                self.found.first.append(now - sent) if last is None else self.found.gaps.append(now - last)
                last = now
            reply.body += data
        if "error" in (events := reply.events)[-1]:
            assert events[-1]["error"]["code"] == "engine_gone", events[-1]
            assert self._died(), events[-1]
            return "engine_gone while streaming"
        assert events[-1] == "[DONE]", events[-1]
        finished = [choice["index"] for event in events[:-1] for choice in event["choices"] if choice["finish_reason"]]
        assert sorted(finished) == list(range(body.get("n", 1))), finished
        return "answered"

    def _died(self) -> bool:
        """Whether ranks have died so lately that open requests may tell of it."""
        return self.killed_at is not None and (
            self.found.back is None or time.monotonic() < self.killed_at + self.found.back + LOST_S
        )

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Status 0: nobody listens."""
        try:
            connection = await self.running.open(path, None)
        except OSError:
            return 0, b""
        try:
            reply = await asyncio.wait_for(connection.all(), LOST_S)
            return reply.status, reply.body
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            self.found.lost.append(f"GET {path}: {error or type(error).__name__}")
            return 0, b""
        finally:
            connection.kill()


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB
    except (OSError, IndexError):
        return 0.0


def growths(found: Found) -> dict[str, tuple[float, float]]:
    """Medians of the MB in use in the last part of a soak: at the begin of that part, and at its end. Empty if that is
    too short a time to say anything: memory grows until steps of all sizes have run."""
    settled = found.memory[-int(len(found.memory) * SETTLED) :]
    if not settled or settled[-1][0] - settled[0][0] < LONG_S / 4:
        return {}
    part = len(settled) // 4

    def median(rows: list[tuple[float, float, float]], column: int) -> float:
        return share([row[column] for row in rows], 0.5)

    return {name: (median(settled[:part], i), median(settled[-part:], i)) for i, name in ((1, "front"), (2, "ranks"))}


def problems(found: Found, times: bool) -> list[str]:
    """What was wrong, one line each."""
    wrong = list(found.lost)
    for name, (before, after) in growths(found).items():
        if after > GROWTH * before + SLACK_MB:
            wrong.append(f"the memory of the {name} grew from {before:.0f} to {after:.0f} MB")
    if found.told_of_death is None or found.back is None:
        wrong.append("no rank was killed, or it did not come back")
    if times:
        if (found.told_of_death or 0) > DEAD_S:
            wrong.append(f"/health/ready told of a death after {found.told_of_death:.1f} s")
        if (found.told_of_halt or 0) > FRESH_S + STUCK_S:
            wrong.append(f"/health/ready told of a halted rank after {found.told_of_halt:.1f} s")
        if share(found.gaps, 0.99) > SPREAD * share(found.gaps, 0.5):
            wrong.append(f"gaps between tokens: the 99th percentile is more than {SPREAD:g} times the median")
        if max(found.health)[0] > ALIVE_S:
            wrong.append(f"/health took {max(found.health)[0]:.2f} s")
    return wrong


def report(found: Found) -> str:
    ms = {name: [1e3 * value for value in values] for name, values in (("gap", found.gaps), ("first", found.first))}
    lines = [
        f"{sum(found.ends.values())} requests: " + ", ".join(f"{n} {end}" for end, n in found.ends.most_common()),
        f"first token: median {share(ms['first'], 0.5):.0f} ms, 99th percentile {share(ms['first'], 0.99):.0f} ms; "
        f"between tokens: median {share(ms['gap'], 0.5):.1f} ms, 99th percentile {share(ms['gap'], 0.99):.1f} ms",
        f"a rank's death was told after {found.told_of_death or -1:.2f} s, ranks served after {found.back or -1:.1f} s",
        f"a rank's halt was told after {found.told_of_halt or -1:.1f} s",
        f"/health: median {1e3 * share([took for took, _ in found.health], 0.5):.0f} ms, longest "
        f"{1e3 * max(found.health)[0]:.0f} ms, {max(found.health)[1]:.0f} s after the start",
        "memory in the last part: "
        + ", ".join(f"{name} {a:.0f} to {b:.0f} MB" for name, (a, b) in growths(found).items()),
        f"held at the end: {found.at_end or 'unknown, /metrics has no gauges'}",
    ]
    return "\n".join(lines)


def soak(folder: Path, seconds: float, clients: int, ranks: int, settings: list[str], seed: int) -> tuple[Found, str]:
    """Runs a server with its temporary files in `folder`. -> what was found, and the server's output"""
    own = ["restarts=1", f"world_size={ranks}", f"input_max_len={LONGEST}", f"max_new_tokens={NEW}", "batch_size=8"]
    own += ["mode=elastic", f"arena_mb={ARENA_MB}", "prefix_floor=256", f"prefill_pause_ms={PAUSE_MS}"]
    own += [f"threads={THREADS}"]
    with server(folder, *own, *settings) as running:
        running.wait_until_ready()
        work = Soak(running, seconds, seed)
        found = asyncio.run(work.run(clients))
        running.process.send_signal(signal.SIGTERM)
        if status := running.wait():
            found.lost.append(f"the server ended with status {status}")
        if running.ranks():
            found.lost.append("the server has left processes behind")
        if "Traceback" in running.text:
            found.lost.append("the server's output has a traceback")
        return found, running.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-times", action="store_true", help="report times, but do not judge them")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    collect_seldom()  # a search for garbage here would be measured as a gap between tokens
    with tempfile.TemporaryDirectory() as folder:
        found, text = soak(Path(folder), 60 * args.minutes, args.clients, args.ranks, args.set, args.seed)
    wrong = problems(found, not args.no_times)
    print(report(found))
    if wrong:
        print(f"the server said:\n{text[-4000:]}\nwrong:")
        print("\n".join(wrong[:40]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
