"""The system's facts about a process, and a process's wish to end with its parent."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

from umbra.base.errors import UserError

PR_SET_PDEATHSIG = 1


def state(pid: int) -> str:
    """The letter that the kernel has for the process's state; X if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_running(pid: int) -> bool:
    """Returns whether the process exists and is no zombie."""
    return state(pid) not in "ZX"


def is_halted(pid: int) -> bool:
    """Returns whether a signal such as SIGSTOP has halted the process."""
    return state(pid) in "Tt"


def rank_of(pid: int) -> int | None:
    """The RANK in the process's environment; None: it is no rank, or has ended."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")), None)


def children() -> list[int]:
    """The processes that this one has started."""
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended
            pids += map(int, (task / "children").read_text().split())
    return pids


def end_with(parent: int, signal_number: int = signal.SIGTERM) -> None:
    """Let this process get the signal as soon as its parent, whose id is `parent`, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # it ended before
        raise UserError(f"the process {parent} that started this one has ended")
