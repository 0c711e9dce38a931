"""The ranks of a server on another node than the first: when they are started again, and what their end says."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from serving.ranks import launcher as module
from serving.ranks.launcher import keep_ranks, main, start_ranks
from umbra.errors import EXIT_STATUS
from umbra.files import ROOT


class Launcher:
    """One that ends with the next of `statuses`; before, this process gets `signals`."""

    pid = 77
    statuses: Iterator[int]
    signals: list[int]
    commands: list[Any]
    passed_on: list[int]

    def __init__(self, command: list[str], **more: Any):
        self.commands.append((command, more))

    def wait(self) -> int:
        for number in self.signals:
            os.kill(os.getpid(), number)
        return next(self.statuses)

    def send_signal(self, number: int) -> None:
        self.passed_on.append(number)


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def kept(monkeypatch: pytest.MonkeyPatch, statuses: list[int], restarts: int = 2, signals: tuple[int, ...] = ()) -> int:
    Launcher.statuses, Launcher.signals, Launcher.commands, Launcher.passed_on = iter(statuses), [*signals], [], []
    monkeypatch.setattr(module.subprocess, "Popen", Launcher)
    return keep_ranks("case", ["a=1", "b=2"], restarts)


ENDS = [  # statuses of launchers, how many are started, the status in the end
    ([0], 1, 0),
    ([EXIT_STATUS], 1, EXIT_STATUS),
    ([143], 1, 143),
    ([128], 1, 128),
    ([1, 0], 2, 0),
    ([1, 127, 1], 3, 1),
    ([-9, -9, -9], 3, 137),
]


@pytest.mark.parametrize(("statuses", "started", "status"), ENDS)
def test_ranks_are_started_again_with_those_of_all_nodes(
    monkeypatch: pytest.MonkeyPatch, handlers: None, capsys: pytest.CaptureFixture[str], statuses: list[int],
    started: int, status: int,
) -> None:  # fmt: skip
    assert kept(monkeypatch, statuses) == status
    assert len(Launcher.commands) == started
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [f"starting this node's ranks again ({n} of 2)" for n in range(1, started)]
    killed = "error: the launcher (pid 77) failed: killed by SIGKILL"
    assert shown.err.splitlines() == [killed] * statuses.count(-9)
    command, more = Launcher.commands[0]
    front = f"--front={os.getpid()}"
    assert command == [sys.executable, "-m", "serving.ranks.launcher", "case", front, "--set=a=1", "--set=b=2"]
    assert more == {"cwd": ROOT, "stdin": subprocess.DEVNULL, "start_new_session": True}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_ends_them_for_good(
    monkeypatch: pytest.MonkeyPatch, handlers: None, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    assert kept(monkeypatch, [-number, 0], signals=(number,)) == 128 + number
    assert Launcher.passed_on == [number]
    assert len(Launcher.commands) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("rank", "said"), [(0, ""), (1, "the server has ended\n")])
def test_a_rank_s_program_is_the_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, said: str
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(module, "launch", lambda case, program: found.append((case.world_size, program)))
    monkeypatch.setattr(module, "node_env", lambda: SimpleNamespace(node_rank=rank))
    monkeypatch.setattr(module, "end_with", found.append)
    monkeypatch.setenv("CASE_NAME", "another")
    start_ranks("demo", ["world_size=2"])
    assert os.environ["CASE_NAME"] == "demo"
    assert found == [(2, ["-m", "serving.ranks.worker", "--set=world_size=2"])]
    assert capsys.readouterr().out == said
    del found[:]
    main(["demo", "--set", "world_size=2", "--set", "threads=1", "--front", "5"])
    assert found == [5, (2, ["-m", "serving.ranks.worker", "--set=world_size=2", "--set=threads=1"])]
    del found[:]
    main(["demo"])
    assert found == [(1, ["-m", "serving.ranks.worker"])]
