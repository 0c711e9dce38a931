"""What a launcher makes of the lines of the others and tells them, with a store and a time that are made up."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from executor.config.env import NodeEnv
from executor.launch import nodes as module
from executor.launch.nodes import (
    BEAT_S,
    CHECK_S,
    JOB,
    LINGER_S,
    LONGEST,
    LOSS_S,
    SLOW_S,
    TELL_AGAIN_S,
    TELL_S,
    TRIPS,
    Cause,
    Job,
    Line,
    Nodes,
    Other,
)
from umbra.errors import UserError

LIMIT_S, NOW = 20.0, 1000.0


class Clock:
    """The time of the launcher, which passes while it sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.slept = NOW, list[float]()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def met(own: int = 1, count: int = 3) -> Nodes:
    """A launcher that has met the others, of which it has just heard."""
    nodes = Nodes(NodeEnv(count, own, "10.0.0.1", 29500), LIMIT_S, 100.0)
    nodes.job = Job([f"start{rank}" for rank in range(count)], "folder")
    nodes.others = [Other(Line(f"start{rank}", f"host{rank}"), NOW) for rank in range(count)]
    nodes._answered = NOW
    return nodes


def test_nobody_ends_a_job_that_goes_on() -> None:
    assert met()._cause(NOW + LIMIT_S) is None
    assert met(0)._cause(NOW + LIMIT_S) is None


def test_a_reason_of_any_node_is_everybodys() -> None:
    why, after = Cause("the cup is empty", 3), Cause("a connection is lost", follows=True)
    for says in (0, 2):
        nodes = met()
        nodes.own.cause = after
        nodes.others[says].line.cause = why
        assert nodes._cause(NOW) == why
    nodes = met()
    nodes.own.cause = why
    nodes.others[1].line.cause = Cause("this node's own line, as read from the store")
    assert nodes._cause(NOW) == why


def test_what_follows_from_something_waits_for_its_reason() -> None:
    """After a lost connection a short silence suffices; if nobody is silent, it is the reason in the end."""
    nodes, after = met(), Cause("a connection is lost", follows=True)
    nodes.others[2].line.cause = after
    assert nodes._cause(NOW + 1) is None
    for other in nodes.others:
        other.changed = NOW + LOSS_S + 1
    nodes._answered = NOW + LOSS_S + 1
    assert nodes._cause(NOW + LOSS_S + 1) is None
    late = NOW + 1 + LIMIT_S + LOSS_S
    for other in nodes.others:
        other.changed = late
    nodes._answered = late
    assert nodes._cause(late) is None
    assert nodes._cause(late + 0.5) == after
    nodes = met()
    nodes.own.cause = after
    nodes.others[0].changed = nodes._answered = NOW + 0.5
    text = "node 2 (host2) has not answered node 1 (host1) for 5 s: dead, halted or cut off"
    assert nodes._cause(NOW + LOSS_S) is None
    assert nodes._cause(NOW + LOSS_S + 0.2) == Cause(text)
    short = met()
    short.limit_s, short.own.cause = 2.0, after
    found = short._cause(NOW + 2.1)
    assert found
    assert " for 2 s: " in found.text


def test_silence_ends_a_job_after_the_limit() -> None:
    nodes = met()
    nodes._answered = NOW + LIMIT_S
    nodes.others[0].changed = NOW + 1
    assert nodes._cause(NOW + LIMIT_S) is None
    text = "node 2 (host2) has not answered node 1 (host1) for 20 s: dead, halted or cut off"
    assert nodes._cause(NOW + LIMIT_S + 0.5) == Cause(text)
    found = nodes._cause(NOW + LIMIT_S + 1.5)
    assert found
    assert found.text.startswith("node 0 (host0), node 2 (host2) have not answered node 1 (host1) for 20 s")
    nodes.others[0].line.left = nodes.others[2].line.left = True
    assert nodes._cause(NOW + LIMIT_S + 1.5) is None  # who has left is not missed


def test_without_the_store_only_node_0_is_known_to_be_silent() -> None:
    nodes = met()
    text = "node 0 (host0) has not answered node 1 (host1) for 20 s: dead, halted or cut off"
    assert nodes._cause(NOW + LIMIT_S + 0.5) == Cause(text)
    nodes.others[0].line.left = True
    assert nodes._cause(NOW + LIMIT_S + 0.5) is None
    first = met(0)
    first.others[1].changed = first.others[2].changed = NOW + 10
    assert first._cause(NOW + LIMIT_S + 0.5) is None  # node 0 has the store itself
    broken = met()
    broken._broken = ConnectionError()
    assert broken._cause(NOW) == Cause("node 0 (host0) is gone: its launcher was killed, or the machine has ended")
    broken.others[0].line.left = True
    assert broken._cause(NOW) is None


def test_a_launcher_that_was_started_anew_is_another_one() -> None:
    nodes = met()
    nodes.others[2].line.start = "another"
    assert nodes._cause(NOW) == Cause("node 2 (host2) has been started anew: the ranks that it had are gone")


def test_what_is_slow_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    def told(nodes: Nodes, rank: int, now: float) -> list[str]:
        nodes._tell_slow(rank, nodes.others[rank], now)
        return sorted(capsys.readouterr().err.splitlines())

    nodes, other = met(), "node 2 (host2)"
    assert told(nodes, 2, NOW + SLOW_S) == []
    slow = f"{other}: slow, no answer for 5 s; the job ends after 20 s"
    assert told(nodes, 2, NOW + SLOW_S + 0.1) == [slow]
    assert told(nodes, 2, NOW + SLOW_S + 1) == []
    nodes.others[2].line.halted = ["rank 4 (pid 9)"]
    halted = f"{other}: rank 4 (pid 9) is halted by a signal, and the job waits for it"
    assert told(nodes, 2, NOW + SLOW_S + 1) == [halted]
    nodes.others[2].changed = NOW + SLOW_S
    nodes.others[2].line.halted = []
    assert told(nodes, 2, NOW + SLOW_S + 1) == [f"{other}: it answers again", f"{other}: rank 4 (pid 9) goes on"]
    assert told(nodes, 1, NOW + 100) == []  # its own line
    nodes._answered = NOW + 100
    assert told(nodes, 0, NOW + 100) == []  # the store answers
    nodes.others[2].line.left = True
    assert told(nodes, 2, NOW + 100) == []
    first = met(0)
    first._answered = NOW + 100
    assert told(first, 1, NOW + 100) == ["node 1 (host1): slow, no answer for 5 s; the job ends after 20 s"]
    assert told(first, 0, NOW + 100) == []
    far = met()
    for trip, lines in ((0.05, 0), (0.051, 1), (0.04, 0), (0.026, 0), (0.025, 1), (0.04, 0)):
        far.others[2].line.trip_s = trip
        assert len(told(far, 2, NOW)) == lines, trip


class Store:
    """Torch's store of strings, in this process; `after` is called at each look at one."""

    def __init__(self, **texts: str):
        self.texts = dict(texts)
        self.looks = 0

    def set(self, key: str, text: str) -> None:
        self.texts[key] = text

    def get(self, key: str) -> bytes:
        return self.texts[key].encode()

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return all(key in self.texts for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def put(self, rank: int, line: Line) -> None:
        self.set(f"umbra/node{rank}", msgspec.json.encode(line).decode())

    def line(self, rank: int) -> Line:
        return msgspec.json.decode(self.get(f"umbra/node{rank}"), type=Line)


def test_a_beat_writes_this_line_and_reads_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, nodes, store = Clock(monkeypatch), met(), Store()
    store.put(0, nodes.others[0].line)
    store.put(2, Line("start2", "host2", beat=4))
    trips = iter([0.5, *[0.1] * (TRIPS - 1), 0.2])
    real = store.check

    def check(keys: list[str]) -> bool:
        assert keys == [JOB]
        clock.now += next(trips)
        return real(keys)

    monkeypatch.setattr(store, "check", check)
    for beat in range(1, TRIPS):
        nodes._beat(store)  # type: ignore[arg-type]
        assert (nodes.own.beat, nodes.own.trip_s) == (beat, 0.0)
    assert store.line(1).beat == TRIPS - 1
    nodes._beat(store)  # type: ignore[arg-type]
    assert nodes.own.trip_s == pytest.approx(0.1)
    nodes._beat(store)  # type: ignore[arg-type]
    assert len(nodes._trips) == TRIPS
    assert nodes._answered == clock.now
    assert nodes.others[0].changed == NOW  # the same line is no sign of life
    assert (nodes.others[2].line.beat, nodes.others[2].changed) == (4, NOW + 0.5)
    assert nodes.others[1].line.beat == nodes.own.beat
    assert not nodes._said.is_set()
    nodes.own.left = True
    trips = iter([0.1])
    nodes._beat(store)  # type: ignore[arg-type]
    assert nodes._said.is_set()
    assert store.line(1).left


def meeting(monkeypatch: pytest.MonkeyPatch, own: int, store: Store) -> tuple[Clock, Nodes, list[tuple[Any, ...]]]:
    """A launcher whose store is `store`, before it has met the others; and how it has connected."""
    clock, made = Clock(monkeypatch), list[tuple[Any, ...]]()

    def connect(*arguments: Any, **more: Any) -> Store:
        made.append((*arguments[:2], arguments[3], arguments[4].total_seconds(), more))
        return store

    monkeypatch.setattr("torch._C._distributed_c10d.TCPStore", connect)
    nodes = Nodes(NodeEnv(3, own, "10.0.0.1", 29500), LIMIT_S, 100.0)
    nodes.own.host = f"host{own}"
    return clock, nodes, made


def test_node_0_begins_the_job_when_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    clock, nodes, made = meeting(monkeypatch, 0, store)
    absent = []

    def sleep(seconds: float) -> None:
        clock.now += seconds
        absent.append(nodes._absent)
        store.put(len(absent), Line(f"start{len(absent)}", f"host{len(absent)}"))

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    assert nodes._absent == "others"
    assert nodes._meet("folder") is store  # type: ignore[comparison-overlap]
    assert made == [("10.0.0.1", 29500, True, 5.0, {"multi_tenant": True, "wait_for_workers": False})]
    assert absent == ["nodes 1, 2", "node 2"]
    assert nodes.job == Job([nodes.own.start, "start1", "start2"], "folder")
    assert msgspec.json.decode(store.get(JOB), type=Job) == nodes.job
    assert [(o.line.host, o.changed) for o in nodes.others] == [(f"host{n}", NOW + 2 * CHECK_S) for n in range(3)]
    assert nodes._answered == NOW + 2 * CHECK_S
    assert nodes.name(2) == "node 2 (host2)"


def test_another_node_waits_until_node_0_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier job of node 0, with an earlier start of this launcher, may still be open."""
    store = Store()
    clock, nodes, made = meeting(monkeypatch, 2, store)
    for rank in (0, 1):
        store.put(rank, Line(f"start{rank}", f"host{rank}"))
    store.set(JOB, msgspec.json.encode(Job(["start0", "start1", "earlier"], "of before")).decode())
    absent = []

    def sleep(seconds: float) -> None:
        absent.append(nodes._absent)
        store.set(JOB, msgspec.json.encode(Job(["start0", "start1", nodes.own.start], "folder")).decode())

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    assert nodes._absent == "node 0"
    nodes._meet("ignored")
    assert made[0][2] is False
    assert absent == ["node 0, which has not left an earlier job yet,"]
    assert nodes.job
    assert nodes.job.folder == "folder"
    assert store.line(2).start == nodes.own.start


def talking(monkeypatch: pytest.MonkeyPatch, *meets: Any) -> tuple[Any, Clock, list[Any]]:
    """A launcher whose thread has talked to the store until it was told to stop after three beats; `meets`: what comes
    of each attempt to meet the others."""
    clock, nodes, done = Clock(monkeypatch), met(), list[Any]()
    nodes.job, attempts, waits = None, iter(meets), list[float]()

    def meet(folder: str) -> Any:
        done.append(folder)
        outcome = next(attempts)
        if isinstance(outcome, Exception):
            raise outcome
        nodes.job = Job([], folder)
        return SimpleNamespace(set_timeout=lambda time: done.append(time.total_seconds()))

    def beat(store: Any) -> None:
        done.append("beat")
        nodes._wake.set()
        if done.count("beat") == 3:
            nodes._stop.set()

    def wait(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(nodes, "_meet", meet)
    monkeypatch.setattr(nodes, "_beat", beat)
    monkeypatch.setattr(nodes._wake, "wait", wait)
    nodes._talk("folder")
    assert waits == [BEAT_S] * done.count("beat")
    return nodes, clock, done


def test_a_launcher_talks_to_the_store_until_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import DistError

    nodes, clock, done = talking(monkeypatch, DistError("not there yet"), DistError("not there yet"), "met")
    assert done == ["folder", "folder", "folder", 86400, "beat", "beat", "beat"]
    assert clock.slept == [CHECK_S] * 2
    assert not nodes._wake.is_set()
    assert nodes._broken is None


def test_what_the_talk_fails_with_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import DistError

    nodes, clock, _ = talking(monkeypatch, DistError("EADDRINUSE: in use"))
    assert type(nodes._broken) is UserError
    assert str(nodes._broken) == "MASTER_PORT=29500 of this node is in use"
    assert clock.slept == []
    lost = ConnectionError("lost")
    nodes, *_ = talking(monkeypatch, lost)
    assert nodes._broken is lost


class Thread:
    """One that is never started."""

    def __init__(self, target: Any, args: tuple[Any, ...], daemon: bool):
        assert daemon

    def start(self) -> None: ...


def test_who_does_not_come_is_told_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, nodes = Clock(monkeypatch), met()
    nodes.job = None
    monkeypatch.setattr(module.threading, "Thread", Thread)
    with pytest.raises(UserError, match=r"^node 0 of NNODES=3 did not come to 10\.0\.0\.1:29500 within 100 s"):
        nodes.join("folder")
    assert clock.now == NOW + 100 + CHECK_S
    assert set(clock.slept) == {CHECK_S}
    said = "waiting for node 0 of NNODES=3 at 10.0.0.1:29500"
    assert TELL_S + TELL_AGAIN_S < 100 < TELL_S + 2 * TELL_AGAIN_S
    assert capsys.readouterr().err.splitlines() == [said] * 2
    nodes._broken = UserError("the port is in use")
    with pytest.raises(UserError, match=r"^the port is in use$"):
        nodes.join("folder")
    nodes.job = Job([], "theirs")
    assert nodes.join("own") == "theirs"


def test_node_0_stays_until_the_others_have_read_why(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = Clock(monkeypatch), list[float]()

    def part(nodes: Nodes) -> float:
        monkeypatch.setattr(nodes._said, "wait", waited.append)
        nodes._said.set()
        start = clock.now
        nodes._part()
        assert nodes.own.left
        assert nodes._wake.is_set()
        assert not nodes._said.is_set()
        return clock.now - start

    assert part(met(1)) == 0
    first = met(0)
    first.others[1].line.left = first.others[2].line.left = True
    assert part(first) == 0
    first.others[2].line.left = False
    assert part(first) == pytest.approx(LINGER_S, abs=CHECK_S)
    first.others[2].changed = clock.now - LOSS_S - 0.1
    assert part(first) == 0  # it cannot be told
    first.others[2].changed = clock.now - LOSS_S + 0.12
    assert part(first) == pytest.approx(0.15)
    assert waited == [BEAT_S] * 5


def test_a_launcher_leaves_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, handled = met(), list[tuple[int, Any]]()
    monkeypatch.setattr(nodes, "_part", lambda: None)
    nodes.leave()
    assert nodes._stop.is_set()
    monkeypatch.setattr(module.signal, "signal", lambda *given: handled.append(given))
    monkeypatch.setattr(module.threading, "Event", lambda: SimpleNamespace(wait=lambda: None))
    with pytest.raises(AssertionError):
        nodes.fail(Cause("x" * (LONGEST + 5), 7))
    assert nodes.own.cause == Cause("x" * LONGEST, 7)
    assert nodes._wake.is_set()
    assert handled == [(signal.SIGTERM, signal.SIG_IGN), (signal.SIGINT, signal.SIG_IGN)]


def test_the_judge_stops_ranks_says_why_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes, done = met(), list[Any]()

    class Left(BaseException):
        pass

    def leave(status: int) -> None:
        done.append(("exit", status))
        raise Left

    monkeypatch.setattr(module.os, "_exit", leave)
    monkeypatch.setattr(nodes, "_first_cause", lambda: None)
    nodes._judge(done.append)
    assert not done
    assert not nodes._ending.locked()
    monkeypatch.setattr(nodes, "_first_cause", lambda: Cause("why", 5))
    monkeypatch.setattr(nodes, "_stop_ranks", lambda: done.append("ranks"))
    monkeypatch.setattr(nodes, "_part", lambda: done.append("part"))
    with pytest.raises(Left):
        nodes._judge(done.append)
    assert done == ["ranks", 5, "part", ("exit", 5)]
    assert nodes.own.cause == Cause("why", 5)
    assert nodes._ending.locked()
    assert capsys.readouterr().err == "error: why\n"


def test_all_ranks_are_killed_before_a_launcher_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, killed = Clock(monkeypatch), list[tuple[int, int]]()
    running = iter([{0: 70, 1: 71}, {1: 71}, {}])

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        if pid == 70:
            raise ProcessLookupError

    monkeypatch.setattr(module, "ranks_below", lambda: next(running))
    monkeypatch.setattr(module.os, "killpg", kill)
    met()._stop_ranks()
    assert killed == [(70, signal.SIGKILL), (71, signal.SIGKILL), (71, signal.SIGKILL)]
    assert clock.slept == [0.01] * 2


def test_halted_ranks_are_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    nodes = met()
    monkeypatch.setattr(module, "ranks_below", lambda: {2: 70, 3: 71})
    monkeypatch.setattr(module, "is_halted", lambda pid: pid == 71)
    waits = iter([False, True])
    monkeypatch.setattr(nodes._stop, "wait", lambda seconds: next(waits))
    assert nodes._first_cause() is None
    assert nodes.own.halted == ["rank 3 (pid 71)"]


def test_silence_while_this_process_was_halted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of half of LOSS_S are its own; shorter ones are silence."""
    nodes, times = met(), iter([0.0, 2.5, 5.1])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    waits = iter([False, False, True])
    monkeypatch.setattr(nodes._stop, "wait", lambda seconds: next(waits))
    assert nodes._first_cause() is None
    assert nodes._answered == pytest.approx(NOW + 2.6)
    assert [other.changed for other in nodes.others] == pytest.approx([NOW + 2.6] * 3)


def test_an_interface_of_an_address_that_no_interface_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.interface_to("::1", 29500) in ("lo", "")  # where there is IPv6
    monkeypatch.setattr(module.socket, "if_nameindex", lambda: [(1, "lo")])
    assert module.interface_to("127.0.0.1", 29500) == "lo"
    monkeypatch.setattr(module.socket, "if_nameindex", list)
    assert module.interface_to("127.0.0.1", 29500) == ""
    if not Path("/proc/net/if_inet6").exists():
        assert module.interface_to("::1", 29500) == ""
