"""What the supervisor makes of its launcher's end, lines and silence, with launchers and times that are made up."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor.config.load import load_case
from serving.ranks import supervisor as module
from serving.ranks.client import ENDED, EngineClient
from serving.ranks.processes import SOCKET, Process
from serving.ranks.supervisor import LONGEST_LINE, Supervisor
from umbra.errors import EXIT_STATUS
from umbra.files import ROOT

PID = 5_000_000  # more than a system has


class Client:
    """What the supervisor asks of its client."""

    def __init__(self) -> None:
        self.path, self.reason, self.longest_step, self.silent_s = Path("/nowhere"), "", 0.0, 0.0
        self.ready: Any = None
        self.alive = self.supervised = self.stopped = False
        self.losses: list[tuple[str, bool]] = []

    def lost(self, reason: str, again: bool) -> None:
        self.reason = reason
        self.losses.append((reason, again))

    def stop(self) -> None:
        self.stopped = True


class Scripted(Supervisor):
    """Each launcher writes the next text of `scripts` and ends with its status."""

    def __init__(self, *scripts: tuple[bytes, int], restarts: int = 0, world_size: int = 2, known: str = ""):
        self.scripts, self.lines, self.reasons = iter(scripts), list[str](), list[str]()
        case = load_case("demo", [f"serve_config.restarts={restarts}", f"world_size={world_size}"])
        self.of = Client()
        self.of.reason = known
        super().__init__(case, "demo", [], cast(EngineClient, self.of), self.lines.append)

    async def _start(self) -> asyncio.subprocess.Process:
        text, status = next(self.scripts)
        self.reasons.append(self.client.reason)
        stream = asyncio.StreamReader()
        stream.feed_data(text)
        stream.feed_eof()

        async def wait() -> int:
            return status

        return cast(asyncio.subprocess.Process, SimpleNamespace(pid=PID, stderr=stream, wait=wait))


def test_ranks_are_started_again_as_often_as_the_case_says() -> None:
    """Every reader of its lines is told why; clients are told without the part that only its user needs."""
    wrong = b"error: rank 1 failed; all ranks' logs: /results/x\n"
    supervisor = Scripted((wrong, 1), (wrong, 1), (wrong, 1), restarts=2, known="of before")
    assert supervisor.of.supervised
    asyncio.run(supervisor.run())
    assert supervisor.of.losses == [("rank 1 failed", True), ("rank 1 failed", True), ("rank 1 failed", False)]
    assert supervisor.reasons == ["", "rank 1 failed", "rank 1 failed"]  # while they start, the last reason is known
    line = "rank 1 failed; all ranks' logs: /results/x"
    assert supervisor.lines == [
        f"{line}; starting the ranks again (1 of 2)", f"{line}; starting the ranks again (2 of 2)", f"error: {line}",
    ]  # fmt: skip
    assert (supervisor.failed, supervisor.restarts, supervisor.status) == ("rank 1 failed", 2, 1)


def test_ranks_that_refuse_a_case_are_not_started_again() -> None:
    supervisor = Scripted((b"error: the cup is empty\n", EXIT_STATUS), restarts=2)
    asyncio.run(supervisor.run())
    assert supervisor.of.losses == [("the cup is empty", False)]
    assert supervisor.lines == ["error: the cup is empty"]


def test_an_error_is_that_of_the_last_launcher() -> None:
    supervisor = Scripted((b"error: the first\n", 1), (b"", 1), restarts=1)
    asyncio.run(supervisor.run())
    assert [reason for reason, _ in supervisor.of.losses] == ["the first", "the first"]  # the client's
    supervisor = Scripted((b"error: the first\n", 1), (b"", -9), restarts=1)
    asyncio.run(supervisor.run())
    assert supervisor.failed == f"the launcher (pid {PID}) failed: killed by SIGKILL"


@pytest.mark.parametrize(("known", "told"), [("", ENDED), ("the server has ended", "the server has ended")])
def test_requests_are_told_why_a_server_stops(known: str, told: str) -> None:
    supervisor = Scripted((b"", 0), restarts=5)

    async def run() -> None:
        await supervisor.stop()
        running = asyncio.create_task(supervisor.run())
        await asyncio.sleep(0)
        supervisor.client.reason = known
        await running

    asyncio.run(run())
    assert supervisor.of.losses == [(told, False)]
    assert (supervisor.lines, supervisor.failed, supervisor.restarts) == ([], "", 0)


def test_ranks_that_serve_are_asked_to_leave_and_given_time() -> None:
    supervisor, waited = Scripted(), list[float]()

    async def run(seconds: float) -> None:
        async def wait() -> None:
            waited.append(seconds)
            await asyncio.sleep(60)

        supervisor._process = cast(asyncio.subprocess.Process, SimpleNamespace(wait=wait))
        await supervisor.stop(seconds)

    asyncio.run(run(0.01))
    assert not supervisor.of.stopped  # they do not serve yet
    supervisor.of.ready = True
    asyncio.run(run(0.02))
    assert supervisor.of.stopped
    assert waited == [0.02]


REASONS: list[tuple[int, int, str, str]] = [  # ranks, status, what rank 0 has said, the reason
    (1, -9, "", f"rank 0 (pid {PID}) failed: killed by SIGKILL"),
    (2, -9, "said", f"the launcher (pid {PID}) failed: killed by SIGKILL"),
    (1, 139, "said", f"rank 0 (pid {PID}) failed: killed by SIGSEGV"),
    (2, 129, "", f"the launcher (pid {PID}) failed: killed by SIGHUP"),
    (2, 128, "", "the ranks have ended with exit status 128"),
    (1, 3, "said", f"rank 0 (pid {PID}) failed: exit status 3: said"),
    (1, 3, ENDED, f"rank 0 (pid {PID}) failed: exit status 3"),
    (1, 0, ENDED, ENDED),
    (2, 3, "said", "said"),
    (2, 0, "", "the ranks have ended with exit status 0"),
]


@pytest.mark.parametrize(("world_size", "status", "said", "reason"), REASONS)
def test_why_ranks_ended(world_size: int, status: int, said: str, reason: str) -> None:
    supervisor = Scripted(world_size=world_size, known=said)
    assert supervisor._reason(PID, status) == reason
    supervisor._error = "an error line"
    assert supervisor._reason(PID, status) == "an error line"
    supervisor._hung = "it hung"
    assert supervisor._reason(PID, status) == "it hung"


def test_a_launcher_is_passed_on_except_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    """Lines of any length, in pieces; of the two lines that are kept, no more than an error line has."""
    supervisor, long = Scripted(), b"x" * (LONGEST_LINE + 10)

    async def run() -> None:
        stream = asyncio.StreamReader()
        reading = asyncio.create_task(supervisor._read_errors(stream))
        for piece in (b"a li", b"ne\nnode 1 is slow\nerr", b"or: b\xffad\n", long[:-1], b"x\nnode " + long, b"\nrest"):
            stream.feed_data(piece)
            for _ in range(3):
                await asyncio.sleep(0)
        stream.feed_eof()
        await reading

    asyncio.run(run())
    shown = capfd.readouterr().err.split("\n")
    assert shown[:2] == ["a line", "node 1 is slow"]
    assert "".join(shown[2:]) == "x" * len(long) + "node " + "x" * len(long)
    assert supervisor._error == "b\N{REPLACEMENT CHARACTER}ad"
    assert supervisor._notice == ("node " + "x" * LONGEST_LINE)[:LONGEST_LINE]


Signals = list[tuple[int, list[Process]]]
LAUNCHER, RANK = Process(7, None), Process(8, 0)


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Signals:
    found: Signals = []
    monkeypatch.setattr(module, "send", lambda number, processes: found.append((number, processes)))
    monkeypatch.setattr(Supervisor, "processes", lambda self: [LAUNCHER, RANK])
    monkeypatch.setattr(Process, "stopped", property(lambda self: self.rank == 0))
    return found


def watched(
    supervisor: Scripted, monkeypatch: pytest.MonkeyPatch, looks: list[dict[str, Any]], nodes: int = 1
) -> list[float]:
    """What `_watch` sleeps while the client is as each of `looks` says; then its launcher has ended."""
    slept, left, ended = list[float](), iter(looks), list[bool]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if seconds == module.CHECK_S:
            for name, value in next(left, {"last": True}).items():
                setattr(supervisor.of, name, value)

    async def end_all() -> None:
        ended.append(True)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(module, "is_running", lambda pid: pid == PID and not hasattr(supervisor.of, "last"))
    monkeypatch.setattr(module, "node_env", lambda: SimpleNamespace(nnodes=nodes))
    monkeypatch.setattr(supervisor, "_end_all", end_all)
    asyncio.run(supervisor._watch(PID))
    assert ended == [True]
    return slept


def test_silence_for_the_timeout_and_ten_longest_steps_is_a_hang(
    monkeypatch: pytest.MonkeyPatch, signals: Signals
) -> None:
    supervisor = Scripted()
    limit = supervisor.case.serve_config.step_timeout_s
    serving = {"alive": True, "ready": SimpleNamespace(results="FOLDER")}
    looks = [
        {"silent_s": limit + 1},  # no rank has come
        serving | {"silent_s": limit},
        {"silent_s": limit + 1, "longest_step": (limit + 1) / 10},
        {"silent_s": limit + 2},
    ]
    assert watched(supervisor, monkeypatch, looks) == [module.CHECK_S] * 4 + [module.STACKS_S]
    told = f"the ranks have not answered for {limit + 2:.0f} s: rank 0 (pid 8) halted by a signal"
    assert supervisor._hung == told
    assert supervisor.lines == [f"{told}; the stacks of all ranks are in FOLDER"]
    assert signals == [(signal.SIGUSR1, [RANK])]


@pytest.mark.parametrize(("notice", "more"), [("", ""), ("node 1 is slow", ": node 1 is slow")])
def test_a_hang_with_the_last_notice(monkeypatch: pytest.MonkeyPatch, signals: Signals, notice: str, more: str) -> None:
    monkeypatch.setattr(Process, "stopped", property(lambda self: False))
    supervisor = Scripted()
    supervisor._notice = notice
    watched(supervisor, monkeypatch, [{"alive": True, "ready": SimpleNamespace(results="F"), "silent_s": 1e6}])
    assert supervisor._hung == "the ranks have not answered for 1000000 s" + more


def test_a_launcher_has_time_to_say_why_rank_0_has_left(monkeypatch: pytest.MonkeyPatch, signals: Signals) -> None:
    for nodes in (1, 2):
        supervisor = Scripted()
        seconds = module.END_S + (nodes - 1) * supervisor.case.parallel_config.node_timeout_s
        slept = watched(supervisor, monkeypatch, [{}, {"alive": True}, {"alive": False, "reason": "it left"}], nodes)
        assert slept == [module.CHECK_S] * 3 + [seconds]
        assert supervisor._hung == "it left"
    assert not signals


@pytest.mark.parametrize(
    ("nodes", "stopping", "gentle"), [(1, False, True), (2, False, False), (2, True, True), (1, True, True)]
)
def test_all_processes_are_ended(
    monkeypatch: pytest.MonkeyPatch, signals: Signals, nodes: int, stopping: bool, gentle: bool
) -> None:
    """A launcher may clean up first, but one of several nodes' is told nothing where it is to come back."""
    monkeypatch.setattr(module, "node_env", lambda: SimpleNamespace(nnodes=nodes))
    supervisor, waited, results = Scripted(), list[float](), iter([False, True])
    supervisor.stopping = stopping

    async def ended(processes: list[Process], within_s: float) -> bool:
        assert processes == [LAUNCHER, RANK]
        waited.append(within_s)
        return next(results)

    monkeypatch.setattr(module, "_ended", ended)
    asyncio.run(supervisor._end_all())
    assert waited == [module.LAUNCHER_S if nodes == 1 else module.NODES_S] * 2
    first = [(signal.SIGKILL, [RANK])] + [(signal.SIGTERM, [LAUNCHER])] * gentle
    assert signals == [*first, (signal.SIGKILL, [LAUNCHER, RANK])]


def test_processes_that_stay_are_waited_for_no_longer_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = 100.0, 6

    async def sleep(seconds: float) -> None:
        nonlocal now, left
        now += 1
        left -= 1

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(module, "is_running", lambda pid: pid == 8 and left > 0)
    assert not asyncio.run(module._ended([LAUNCHER, RANK], 4))
    assert now == 105
    assert asyncio.run(module._ended([LAUNCHER, RANK], 4))
    assert asyncio.run(module._ended([], 0))


def test_a_rank_alone_is_its_own_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "processes_of", lambda path: [LAUNCHER, RANK])
    assert Scripted(world_size=2).processes() == [LAUNCHER, RANK]
    assert Scripted(world_size=1).processes() == [Process(7, 0), Process(8, 0)]


class Counted(Scripted):
    """Counts how often all processes are ended, and what became of those that watch."""

    def __init__(self, *scripts: tuple[bytes, int], **more: Any):
        super().__init__(*scripts, **more)
        self.ends = self.watches = self.cancelled = 0

    async def _end_all(self) -> None:
        self.ends += 1

    async def _watch(self, launcher: int) -> None:
        assert launcher == PID
        self.watches += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def test_nothing_is_left_of_a_launcher_that_has_ended() -> None:
    supervisor = Counted((b"error: it broke\n", 1), (b"error: it broke\n", 1), restarts=1)
    assert (supervisor._hung, supervisor._error, supervisor._notice, supervisor.restarts) == ("", "", "", 0)
    assert (supervisor.failed, supervisor.stopping, supervisor.status) == ("", False, None)

    async def run() -> None:
        wait = supervisor._start

        async def start() -> asyncio.subprocess.Process:
            process: Any = await wait()
            status = process.wait

            async def later() -> int:
                await asyncio.sleep(0)
                return cast(int, await status())

            process.wait = later
            return cast(asyncio.subprocess.Process, process)

        supervisor._start = start  # type: ignore[method-assign]
        await supervisor.run()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert (supervisor.ends, supervisor.watches, supervisor.cancelled) == (2, 2, 2)


def test_a_launcher_that_is_started_while_a_server_stops_is_ended() -> None:
    supervisor = Counted((b"", 0))

    async def run() -> None:
        await supervisor.stop()
        assert (supervisor.stopping, supervisor.ends) == (True, 1)
        await supervisor.run()

    asyncio.run(run())
    assert supervisor.ends == 3  # once it is started, and once it has ended


def test_how_a_launcher_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a session of its own, so that Ctrl-C does not reach it, with the socket in its environment."""
    started: list[Any] = []
    process = object()

    async def start(*command: str, **more: Any) -> object:
        started.append((command, more))
        return process

    monkeypatch.setattr("serving.ranks.supervisor.asyncio.create_subprocess_exec", start)
    monkeypatch.setenv("OF_THIS_PROCESS", "kept")
    supervisor = Scripted()
    supervisor.overrides = ["a=1", "b=2"]
    assert asyncio.run(Supervisor._start(supervisor)) is process
    ((command, more),) = started
    front = f"--front={os.getpid()}"
    assert command == (sys.executable, "-m", "serving.ranks.launcher", "demo", front, "--set=a=1", "--set=b=2")
    environment = more.pop("env")
    assert (environment["OF_THIS_PROCESS"], environment[SOCKET]) == ("kept", "/nowhere")
    assert more == {
        "cwd": ROOT, "stdin": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.PIPE, "start_new_session": True,
    }  # fmt: skip


def test_lines_behind_an_error_are_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    """Also those that come with it; a line without an end is passed on once it is as long as one may be."""
    supervisor, shown = Scripted(), list[str]()

    async def run() -> None:
        stream = asyncio.StreamReader()
        reading = asyncio.create_task(supervisor._read_errors(stream))
        for piece in (b"error: first\na\nb\n", b"x" * (LONGEST_LINE - 1), b"y", b"error: second\nc\n"):
            stream.feed_data(piece)
            for _ in range(3):
                await asyncio.sleep(0)
            shown.append(capfd.readouterr().err)
        stream.feed_eof()
        await reading

    asyncio.run(run())
    assert shown == ["a\nb\n", "", "x" * (LONGEST_LINE - 1) + "y\n", "c\n"]
    assert supervisor._error == "second"
