"""How the processes of a server end."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.ranks import processes
from serving.ranks.processes import Process, run_and_leave
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


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (15, "SIGTERM"), (200, "signal 200")])
def test_signals_have_names(number: int, name: str) -> None:
    assert processes.signal_name(number) == name


def test_processes_that_have_ended_get_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []

    def send(pid: int, number: int) -> None:
        sent.append((pid, number))
        if pid == 7:
            raise ProcessLookupError

    monkeypatch.setattr(processes, "os", SimpleNamespace(kill=send))
    processes.send(10, [Process(7, None), Process(8, 0)])
    assert sent == [(7, 10), (8, 10)]


def test_processes_of_a_socket_are_those_that_run_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not this one, none of another socket, and none whose files cannot be read."""
    for name, environment in (
        ("7", b"A=1\0UMBRA_SERVE_SOCKET=/s\0"), ("8", b"UMBRA_SERVE_SOCKET=/s2\0"), ("9", b"UMBRA_SERVE_SOCKET=/s"),
        ("10", b"UMBRA_SERVE_SOCKET=/s\0"), ("11", b"UMBRA_SERVE_SOCKET=/s\0"), ("self", b"UMBRA_SERVE_SOCKET=/s\0"),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "environ").write_bytes(environment)
    (tmp_path / "12").mkdir()
    monkeypatch.setattr(processes, "os", SimpleNamespace(getpid=lambda: 10))
    monkeypatch.setattr(processes, "is_running", lambda pid: pid != 11)
    monkeypatch.setattr(processes, "rank_of", lambda pid: {7: 1}.get(pid))
    monkeypatch.setattr(processes, "is_halted", lambda pid: pid == 9)
    monkeypatch.setattr(processes, "Path", lambda path: {"/proc": tmp_path}[path])
    found = sorted(processes.processes_of(Path("/s")), key=lambda process: process.pid)
    assert found == [Process(7, 1), Process(9, None)]
    assert [process.stopped for process in found] == [False, True]


def ended(main: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """-> the status with which a process ends, and what was written out before"""
    log: list[Any] = []

    class Stream:
        def __init__(self, name: str):
            self.name = name

        def write(self, text: str) -> None: ...

        def flush(self) -> None:
            log.append(self.name)
            if self.name == "out":
                raise OSError

    monkeypatch.setattr(processes, "run_main", lambda main: main([]))
    monkeypatch.setattr(processes, "os", SimpleNamespace(_exit=log.append))
    monkeypatch.setattr(processes, "sys", SimpleNamespace(stdout=Stream("out"), stderr=Stream("err")))
    run_and_leave(main)
    return log[-1], log[:-1]


def test_a_process_ends_with_all_that_it_has_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(argv: list[str]) -> None:
        raise SystemExit

    for main, status in ((lambda argv: None, 0), (nothing, 0), (ends_with_three, 3), (fails, 1)):
        assert ended(main, monkeypatch) == (status, ["out", "err"])
    assert "ValueError: the cup is empty" in capsys.readouterr().err
