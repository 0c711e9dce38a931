"""A soak of whole servers: hours of random requests from good, bad, slow and vanishing clients, with ranks that are
killed and halted and servers that are ended and started again; everything that happens goes into a history.

    .venv/bin/python -m tests.serving.soak HISTORY [--minutes 120] [--rate 8]

The demo's experts, the requests and their prefixes share an arena too small for all of them, and decode steps have
drafts. Before the soak a plain server, without any of these, answers each question alone. A checker
(tests/serving/history.py) then replays the history; a violation is printed, and ends the soak with status 1. Times
of a busy machine say nothing.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.serving import answers
from tests.serving.answers import PATHS
from tests.serving.api.front import Connection, Reply
from tests.serving.history import LONG_S, LOST_S, Checker, Event
from tests.serving.questions import LONG_BODY, LONGEST, NEW, VOCABULARY, WRONG, Question, Wrong, questions
from tests.serving.test_server import Process, server
from umbra.base.errors import collect_seldom

PLAIN = ["batch_size=1", "prefix_cache=false", f"input_max_len={LONGEST}", f"max_new_tokens={NEW}"]
HARD = [
    f"input_max_len={LONGEST}",
    f"max_new_tokens={NEW}",
    "batch_size=8",
    "max_queue=16",
    "restarts=9",
    "mode=elastic",
    "arena_mb=8",
    "prefix_floor=256",
    "reserve=16",
    "draft_config.method=lookup",
    "draft_config.tokens=4",
    "prefill_pause_ms=2",
]
CLIENTS = {"whole": 72, "vanishes": 12, "slow": 3, "wrong": 13}  # in a hundred
STREAMED = 0.7
MOST_OPEN = 40  # requests; those beyond wait, so that a slow machine is not flooded
BURST, BURST_S = 20, 60.0  # requests that come at once, and how often
SAMPLE_S, QUIET_S = 5.0, 240.0  # between two looks at processes, and between two times without requests
STATES_S = 2.5  # until gauges are those of a server at rest
YARDSTICK = 64, 32  # tokens of the prompts and answers by which the last server is compared with a new one
PAIRS, WARM_UP = 200, 200  # such requests, and questions that the new one is asked before
TICKS: int = os.sysconf("SC_CLK_TCK")
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6
GAUGES = re.compile(r"^umbra:([a-z0-9_]+)\{(.*)\} (\S+)$", re.M)
LABEL = re.compile(r'(finished_reason|reason|tenant)="([^"]*)"')


class History:
    """Events with the times at which they happened, one line of JSON each."""

    def __init__(self, path: Path):
        self.path = path
        self.file = open(path, "w", buffering=1)  # noqa: SIM115 (until the process ends; each line at once)

    def events(self) -> list[Event]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def add(self, what: str, **facts: Any) -> None:
        self.file.write(json.dumps({"t": round(time.monotonic(), 6), "what": what, **facts}) + "\n")


def plan(seconds: float) -> list[tuple[float, str]]:
    """Returns the events of the soak with their times in seconds. A long soak gives its last server, and its last
    ranks, most of the time, because slow growth is seen there."""
    if seconds >= LONG_S:
        steps = [(0.05, "kill"), (0.1, "drain"), (0.13, "kill"), (0.16, "halt"), (0.2, "drain"), (0.25, "kill")]
    else:
        steps = [(0.2, "kill"), (0.4, "drain")]
    return [(share * seconds, step) for share, step in steps]


class Soak:
    """`rate` is that of requests, a second."""

    def __init__(self, history: History, folder: Path, seconds: float, rate: float):
        self.history, self.folder, self.seconds, self.rate = history, folder, seconds, rate
        self.random = random.Random(0)
        self.questions = questions(min(600, 40 + int(seconds / 6)), 0)
        self.running: Process
        self.open: set[asyncio.Task[None]] = set()
        self.paused = False
        self.number = 0
        self.life, self.start = 0, 0.0

    def run(self) -> None:
        with server(self._folder("plain"), *PLAIN) as self.running:
            self.running.wait_until_ready()
            asyncio.run(self._alone())
        steps = [*plan(self.seconds), (self.seconds, "drain")]
        while steps:
            lasts = [step for _, step in steps].index("drain") + 1
            with server(self._folder(f"life{self.life}"), *HARD) as self.running:
                self.running.wait_until_ready()
                if not self.life:
                    self.start = time.monotonic()
                    self.history.add("start")
                self.history.add("ready", life=self.life, pid=self.running.process.pid)
                asyncio.run(self._life(steps[:lasts]))
                status = self.running.wait()
                self.history.add(
                    "exit",
                    life=self.life,
                    status=status,
                    left=len(self.running.ranks()),
                    files=[str(path) for path in self.running.folder.glob("umbra-*")],
                    traceback=self.running.text[-4000:] if "Traceback" in self.running.text else "",
                )
            steps = steps[lasts:]
            self.life += 1
        self.history.add("over")

    def _folder(self, name: str) -> Path:
        (folder := self.folder / name).mkdir()
        return folder

    async def _alone(self) -> None:
        """Asks each question while nothing else runs. One whose answer another question has as well is not asked again,
        since an answer should say whose it is."""
        known: set[str] = set()
        kept = []
        for question in self.questions:
            reply = await self._get(PATHS[question.apis[0]], question.body)
            assert reply.status == 200, (question, reply.body)
            record = answers.whole(question.apis[0], reply.json).record()
            del record["ids"]
            if (said := json.dumps(record["texts"])) not in known:
                kept.append(question)
                self.history.add(
                    "question",
                    key=question.key,
                    kind=question.kind,
                    choices=question.choices,
                    most=question.most,
                    **record,
                )
            known.add(said)
        self.questions = kept

    async def _life(self, steps: list[tuple[float, str]]) -> None:
        """A server's life from its first request to its drain."""
        traffic = [asyncio.create_task(work()) for work in (self._arrivals, self._bursts, self._looks, self._health)]
        try:
            quiet_s = min(QUIET_S, self.seconds / 4)
            for at, step in steps:
                while (left := self.start + at - time.monotonic()) > quiet_s:
                    await asyncio.sleep(quiet_s)
                    await self._quiet()
                await asyncio.sleep(max(0.0, left))
                await self._quiet()
                if at == self.seconds >= LONG_S:
                    self.paused = True
                    await asyncio.to_thread(self._beside_a_new_one)
                    self.paused = False
                await asyncio.sleep(1.0)  # of requests, which the fault finds
                await {"kill": self._kill, "halt": self._halt, "drain": self._drain}[step]()
            for task in traffic:
                if task.done():
                    task.result()  # it has failed
        finally:
            for task in traffic:
                task.cancel()
        await asyncio.wait(self.open, timeout=LOST_S) if self.open else None

    async def _arrivals(self) -> None:
        while True:
            await asyncio.sleep(self.random.expovariate(self.rate))
            self._begin()

    async def _bursts(self) -> None:
        while True:
            await asyncio.sleep(min(BURST_S, self.seconds / 4))
            for _ in range(BURST):
                self._begin("whole")

    def _begin(self, kind: str = "") -> None:
        if not self.paused and len(self.open) < MOST_OPEN:
            kind = kind or self.random.choices(list(CLIENTS), list(CLIENTS.values()))[0]
            task = asyncio.create_task(self._client(kind))
            self.open.add(task)
            task.add_done_callback(self.open.discard)

    async def _client(self, kind: str) -> None:
        """Sends one request, and records how it ended."""
        self.number += 1
        number, facts = self.number, {}
        wide = [question for question in self.questions if question.kind == "wide"] if kind == "slow" else []
        question = self.random.choice(wide if wide and self.random.random() < 0.5 else self.questions)
        wrong = self.random.choice(WRONG)
        api = self.random.choice(question.apis)
        stream = self.random.random() < STREAMED or kind == "slow"
        if kind == "wrong":
            facts = {"wanted": wrong.status, "path": wrong.path}
        else:
            facts = {"key": question.key, "api": api, "stream": stream}
        self.history.add("send", id=number, client=kind, life=self.life, **facts)
        outcome: dict[str, Any]
        try:
            work = self._wrong(number, wrong) if kind == "wrong" else self._asks(number, kind, question, api, stream)
            outcome = await asyncio.wait_for(work, LOST_S)
        except asyncio.TimeoutError:
            outcome = {"how": "lost", "why": f"nothing was heard for {LOST_S:g} s"}
        except ConnectionRefusedError:
            outcome = {"how": "unreachable"}
        except (OSError, asyncio.IncompleteReadError) as error:
            outcome = {"how": "cut", "why": f"{type(error).__name__}: {error}"}
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            outcome = {"how": "lost", "why": f"unreadable: {type(error).__name__}: {error}"}
        self.history.add("end", id=number, **outcome)

    async def _asks(self, number: int, kind: str, question: Question, api: str, stream: bool) -> dict[str, Any]:
        draw = self.random
        body = question.asked(api) | {"stream": stream}
        if api in ("completions", "chat"):
            if stream and kind != "vanishes":
                body["stream_options"] = {"include_usage": True, "continuous_usage_stats": draw.random() < 0.3}
            if draw.random() < 0.1:
                body["priority"] = draw.choice((-1, 1))
            if draw.random() < 0.1:
                body["cache_salt"] = draw.choice("ab")
        until = draw.choice(("body", "head", "stream", "stream")) if kind == "vanishes" else ""
        headers = {"x-request-id": f"soak-{number}", "connection": "close"}
        connection = await self._new(kind, PATHS[api], body, headers, until)
        try:
            if until in ("body", "head"):
                await asyncio.sleep(draw.expovariate(10.0))
                return {"how": "vanished", "at": until}
            reply = await connection.head()
            data = await self._body(connection, kind, draw.randint(1, 20) if until else None)
            if reply.status == 200:
                answer = answers.streamed(api, data, bool(until)) if stream else answers.whole(api, json.loads(data))
            else:
                answer = answers.failed(json.loads(data))
                answer.expect(reply.status != 429 or int(reply.headers["retry-after"]) > 0, "no Retry-After")
            answer.expect(reply.headers["x-request-id"] == f"soak-{number}", "the answer bears another request's id")
            how = "vanished" if until and stream and reply.status == 200 else "answered"
            if how == "answered":
                answer.expect(await connection.reader.read() == b"", "bytes follow the answer")
            return {"how": how, "status": reply.status, **answer.record()}
        finally:
            connection.kill()

    async def _new(self, kind: str, path: str, body: dict[str, Any], headers: dict[str, str], until: str) -> Connection:
        """A connection on which the request was sent or, for a client that vanishes then, half of its body."""
        if until == "body":
            data = json.dumps(body).encode()
            sizes = headers | {"content-length": str(len(data))}
            return await self.running.open(path, body, raw=data[: len(data) // 2], headers=sizes)
        return await self.running.open(path, body, headers=headers, buffer=4096 if kind == "slow" else 0)

    async def _body(self, connection: Connection, kind: str, chunks: int | None) -> bytes:
        """The body of an answer or, for a client that vanishes, of its first `chunks` chunks."""
        reply = connection.reply
        if "content-length" in reply.headers:
            return await connection.reader.readexactly(int(reply.headers["content-length"]))
        stalls = self.random.randint(1, 20) if kind == "slow" else 0
        data, count = b"", 0
        while count != chunks and (chunk := await connection.chunk()):
            data += chunk
            count += 1
            if kind == "slow":
                await asyncio.sleep(2.0 if count == stalls else 0.02)
        return data

    async def _wrong(self, number: int, wrong: Wrong) -> dict[str, Any]:
        headers = {"x-request-id": f"soak-{number}"}
        if wrong.status == 413:
            headers["content-length"] = str(LONG_BODY)
        sent = {"method": wrong.method, "raw": wrong.raw, "headers": headers}
        connection = await self.running.open(wrong.path, wrong.body, **sent)
        try:
            reply = await connection.all()
            answer = answers.failed(reply.json)
            answer.expect(reply.headers["x-request-id"] == f"soak-{number}", "the answer bears another request's id")
            return {"how": "answered", "status": reply.status, **answer.record()}
        finally:
            connection.kill()

    async def _get(self, path: str, body: Any = None) -> Reply:
        connection = await self.running.open(path, body)
        try:
            return await asyncio.wait_for(connection.all(), LOST_S)
        finally:
            connection.kill()

    async def _looks(self) -> None:
        """Records the processes of the server, again and again."""
        while True:
            self.history.add("look", life=self.life, processes=processes(self.running))
            await asyncio.sleep(SAMPLE_S)

    async def _health(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            sent = time.monotonic()
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                await self._get("/health")
                self.history.add("health", seconds=round(time.monotonic() - sent, 4))

    async def _quiet(self) -> None:
        """Waits until no request is open and nothing is held, and records what the server says."""
        self.paused = True
        try:
            await asyncio.wait(self.open, timeout=LOST_S) if self.open else None
            end = time.monotonic() + 20
            await asyncio.sleep(STATES_S)
            metrics = await self._metrics()
            while any(map(metrics.get, HELD)) and time.monotonic() < end:
                await asyncio.sleep(0.5)
                metrics = await self._metrics()
            self.history.add("quiet", life=self.life, metrics=metrics, processes=processes(self.running))
        finally:
            self.paused = False

    async def _metrics(self) -> dict[str, float]:
        text = (await self._get("/metrics")).body.decode()
        values = {}
        for name, labels, value in GAUGES.findall(text):
            if not name.endswith("_bucket"):
                label = LABEL.search(labels)
                values[f"{name}:{label[2]}" if label else name] = float(value)
        return values

    def _beside_a_new_one(self) -> None:
        """Sends requests to the server that has run for long and to one that was just started, in turns, and records
        the seconds of CPU that they took."""
        length, tokens = YARDSTICK
        draw = random.Random(1)

        async def pairs() -> None:
            for question in itertools.islice(itertools.cycle(self.questions), WARM_UP):
                await new.reply(PATHS[question.apis[0]], question.body)
            before = cpu_of(self.running), cpu_of(new)
            for _ in range(PAIRS):
                body = {"prompt": draw.choices(VOCABULARY, k=length), "max_tokens": tokens, "ignore_eos": True}
                for running in (self.running, new):
                    reply = await running.reply("/v1/completions", body | {"temperature": 0, "stream": True})
                    assert reply.events[-1] == "[DONE]"
            self.history.add("compared", old=cpu_of(self.running) - before[0], new=cpu_of(new) - before[1])

        with server(self._folder("new"), *HARD) as new:
            new.wait_until_ready()
            asyncio.run(pairs())

    async def _kill(self) -> None:
        """Kills a rank; the supervisor starts the ranks again."""
        await self._hurt("kill", signal.SIGKILL)

    async def _halt(self) -> None:
        """Halts a rank until the server says that it does not serve."""
        await self._hurt("halt", signal.SIGSTOP)

    async def _hurt(self, kind: str, number: signal.Signals) -> None:
        self.history.add("fault", kind=kind, life=self.life)
        victim = self.random.choice([pid for pid in self.running.ranks() if name_of(pid) == "rank"])
        os.kill(victim, number)
        told = await self._until_ready(False)
        if kind == "halt":
            os.kill(victim, signal.SIGCONT)
        self.history.add("mended", kind=kind, told=told, took=await self._until_ready(True))

    async def _drain(self) -> None:
        self.history.add("fault", kind="drain", life=self.life)
        self.running.process.send_signal(signal.SIGTERM)
        while self.running.process.poll() is None:
            await asyncio.sleep(0.02)

    async def _until_ready(self, ready: bool) -> float | None:
        """-> seconds until /health/ready says that the server is, or is not, ready; None: it does not"""
        start = time.monotonic()
        while ((await self.running.reply("/health/ready", None)).status == 200) != ready:
            if time.monotonic() > start + LOST_S:
                return None
            await asyncio.sleep(0.02)
        return time.monotonic() - start


HELD = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def name_of(pid: int) -> str:
    """Returns the role of a server's process; empty: it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    parts = {
        b"umbra.serving.ranks.worker": "rank",
        b"umbra.serving.api.compiling": "compiler",
        b"umbra\0serve": "front",
    }
    return next((name for part, name in parts.items() if part in command), "other" if command else "")


def family(running: Process) -> list[int]:
    """The front and every process below it."""
    pids = [running.process.pid]
    for pid in pids:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                pids += map(int, children.read_text().split())
    return pids


def processes(running: Process) -> list[dict[str, Any]]:
    """The processes of a server: memory in MB, threads, descriptors, seconds of CPU."""
    rows = []
    for pid in family(running):
        with suppress(OSError, IndexError):
            folder = Path(f"/proc/{pid}")
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            memory = int((folder / "statm").read_text().split()[1]) * PAGE_MB
            files, cpu = len(list((folder / "fd").iterdir())), (int(stat[11]) + int(stat[12])) / TICKS
            facts = {"mb": round(memory, 2), "threads": int(stat[17]), "files": files, "cpu": cpu}
            if name := name_of(pid):
                rows.append({"pid": pid, "name": name, **facts})
    return rows


def cpu_of(running: Process) -> float:
    return sum(process["cpu"] for process in processes(running) if process["name"] in ("front", "rank"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("history", type=Path)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--rate", type=float, default=8, help="requests a second")
    args = parser.parse_args()
    collect_seldom()  # a search for garbage here would be measured as a gap between tokens
    with tempfile.TemporaryDirectory() as folder:
        history = History(args.history)
        Soak(history, Path(folder), 60 * args.minutes, args.rate).run()
    checker = Checker(history.events())
    print(checker.table())
    for violation in checker.violations[:40]:
        print(f"wrong: {violation}")
    sys.exit(1 if checker.violations else 0)


if __name__ == "__main__":
    main()
