"""The processes of a server end, are found, and start again on another node than the first."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from umbra.base.errors import EXIT_STATUS, UserError
from umbra.serving.ranks.launcher import keep_ranks
from umbra.serving.ranks.processes import SOCKET, processes_of, run_and_leave, send, signal_name


def fails(argv: list[str]) -> None:
    raise ValueError("the cup is empty")


def is_refused(argv: list[str]) -> None:
    raise UserError("the cup is empty")


@pytest.mark.parametrize(
    ("main", "status", "traceback"), [(lambda argv: None, 0, False), (is_refused, 2, False), (fails, 1, True)]
)
def test_the_status_is_that_of_what_ran(
    main: Callable[[list[str]], None], status: int, traceback: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only what nobody foresaw has a traceback."""
    if not (child := os.fork()):
        run_and_leave(main)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    printed = capfd.readouterr().err
    assert ("Traceback" in printed) == traceback
    assert ("the cup is empty" in printed) == (main in (fails, is_refused))


def test_processes_of_a_socket_are_those_that_run_with_it(tmp_path: Path) -> None:
    """None of another socket; those that have ended get no signal."""
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    own, other = (
        subprocess.Popen(sleeping, env=os.environ | {SOCKET: str(tmp_path / name), "RANK": "3"}) for name in "ab"
    )
    try:
        (listed,) = processes_of(tmp_path / "a")
        assert (listed.pid, listed.rank, listed.stopped) == (own.pid, 3, False)
        send(signal.SIGKILL, [listed])
        assert own.wait(300) == -signal.SIGKILL
        send(signal.SIGKILL, [listed])
        assert processes_of(tmp_path / "a") == []
    finally:
        for process in (own, other):
            process.kill()
            process.wait()
    assert signal_name(200) == "signal 200"


# A launcher that ends as the next of its arguments says, and counts its starts in a file.
LAUNCHER = """
import os, pathlib, sys, time
starts, *ends = sys.argv[1:]
with open(starts, "a") as file: file.write("x")
end = int(ends[len(pathlib.Path(starts).read_text()) - 1])
if end == 15:
    os.kill(os.getppid(), end)
    time.sleep(60)
os.kill(os.getpid(), -end) if end < 0 else sys.exit(end)
"""


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


# How launchers end, how many are started, the status in the end.
ENDS = [([EXIT_STATUS], 1, EXIT_STATUS), ([1, 127, 1], 3, 1), ([-9, 0], 2, 0), ([15], 1, 143)]


@pytest.mark.parametrize(("ends", "started", "status"), ENDS)
def test_ranks_are_started_again_with_those_of_all_nodes(
    tmp_path: Path, handlers: None, capfd: pytest.CaptureFixture[str], ends: list[int], started: int, status: int
) -> None:
    """At most twice here, and not if the case is wrong, or if somebody has asked this process (15) or them to end."""
    starts = tmp_path / "starts"
    assert keep_ranks(["-c", LAUNCHER, str(starts), *map(str, ends)], restarts=2) == status
    assert starts.read_text() == "x" * started
    shown = capfd.readouterr()
    assert shown.out.splitlines() == [f"starting this node's ranks again ({n} of 2)" for n in range(1, started)]
    assert (") failed: killed by SIGKILL" in shown.err) == (-9 in ends)
