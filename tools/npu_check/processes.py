"""Starts processes of this tool and ends them with all their children."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from umbra.base.files import ROOT


class Process(Protocol):
    pid: int

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""


def start(arguments: list[str], environment: dict[str, str], log: Path, group: bool) -> Process:
    """Starts `python -m umbra.tools.npu_check ARGUMENTS` with its output in `log`; `group`: in a process group
    of its own."""
    with open(log, "ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "umbra.tools.npu_check", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=group,
        )


def end_group(process: Process) -> None:
    """Kills the process and all that it has started, and waits until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    while process.poll() is None:
        time.sleep(0.01)


def how_it_ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def last_line(log: Path) -> str:
    """The last line of a log that has letters in it."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return next((line.strip() for line in reversed(lines) if any(c.isalpha() for c in line)), "nothing was printed")
