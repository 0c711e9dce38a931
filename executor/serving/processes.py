"""The processes of a server's ranks: how they begin and end, and how the front finds them."""

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from errors import UserError, run_main

SOCKET = "UMBRA_SERVE_SOCKET"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Process:
    pid: int
    rank: int | None  # None: the launcher

    @property
    def stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has halted it."""
        return _state(self.pid) in "Tt"


def processes_of(socket: Path) -> list[Process]:
    """The processes of this machine, besides this one, that have `socket` in their environment and run."""
    wanted = f"{SOCKET}={socket}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes().split(b"\0")
                if wanted in environment and is_running(int(entry.name)):
                    ranks = [int(value[5:]) for value in environment if value.startswith(b"RANK=")]
                    found.append(Process(int(entry.name), ranks[0] if ranks else None))
    return found


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    return _state(pid) not in "ZX"


def send(signal_number: int, processes: list[Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal_number)


def end_with(parent: int) -> None:
    """Let this process get SIGTERM as soon as its parent, whose id is `parent`, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before
        raise UserError("the front that started these ranks has ended")


def run_and_leave(main: Callable[[list[str]], None]) -> None:
    """Runs `main` like `run_main` and ends this process without the interpreter's clean-up, which takes seconds on a
    busy machine and does nothing that the end of the process does not."""
    status = 0
    try:
        run_main(main)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def _state(pid: int) -> str:
    """The letter that the kernel has for the process's state; X if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
