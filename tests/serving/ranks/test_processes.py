"""How the processes of a server end, and how they are found."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.ranks.processes import SOCKET, processes_of, run_and_leave, send, signal_name
from umbra.errors import UserError


def fails(argv: list[str]) -> None:
    raise ValueError("the cup is empty")


def is_refused(argv: list[str]) -> None:
    raise UserError("the cup is empty")


def ends_with_three(argv: list[str]) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("main", "status", "traceback"),
    [(lambda argv: None, 0, False), (is_refused, 2, False), (ends_with_three, 3, False), (fails, 1, True)],
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
        (found,) = processes_of(tmp_path / "a")
        assert (found.pid, found.rank, found.stopped) == (own.pid, 3, False)
        send(signal.SIGKILL, [found])
        assert own.wait(30) == -signal.SIGKILL
        send(signal.SIGKILL, [found])
        assert processes_of(tmp_path / "a") == []
    finally:
        for process in (own, other):
            process.kill()
            process.wait()
    assert signal_name(200) == "signal 200"
