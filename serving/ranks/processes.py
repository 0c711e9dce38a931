"""The processes of a server's ranks: how they begin and end, and how the front finds them."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from umbra.base.errors import run_main
from umbra.executor.launch.processes import is_halted, is_running, rank_of

SOCKET = "UMBRA_SERVE_SOCKET"


@dataclass(frozen=True)
class RankProcess:
    pid: int
    rank: int | None  # None: the launcher

    @property
    def stopped(self) -> bool:
        """Says whether a signal such as SIGSTOP has halted the process."""
        return is_halted(self.pid)


def processes_of(socket: Path) -> list[RankProcess]:
    """The processes of this machine, besides this one, that have `socket` in their environment and run."""
    wanted = f"{SOCKET}={socket}".encode()
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes().split(b"\0")
                if wanted in environment and is_running(int(entry.name)):
                    processes.append(RankProcess(int(entry.name), rank_of(int(entry.name))))
    return processes


def send(signal_number: int, processes: list[RankProcess]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal_number)


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


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
