"""Runs a piece of a program in a process that is forked from this one, in which everything is imported already."""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Body = Callable[[], object]


@dataclass(frozen=True)
class Ended:
    """The end of a process, with what it and its children printed."""

    status: int  # exit status; negative: the signal that killed it
    out: str
    err: str
    hung: bool = False

    @property
    def errors(self) -> list[str]:
        """The lines on stderr."""
        return self.err.splitlines()


class Fork:
    """A process that runs `body` and ends as a program does: with the status of SystemExit, and with a traceback and
    status 1 after another exception. Its output goes to files beside `log`."""

    def __init__(self, body: Body, log: Path):
        self.paths = log.with_suffix(".out"), log.with_suffix(".err")
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run(body)

    def wait(self, limit_s: float) -> Ended:
        """Kills it after `limit_s` seconds."""
        until, hung = time.monotonic() + limit_s, False
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                out, err = (path.read_text(errors="replace") for path in self.paths)
                return Ended(os.waitstatus_to_exitcode(status), out, err, hung)
            if not hung and time.monotonic() > until:
                hung = True
                os.kill(self.pid, signal.SIGABRT)  # faulthandler writes the stacks
            if time.monotonic() > until + 2:
                self.kill()
            time.sleep(0.002)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _run(self, body: Body) -> None:
        status = 1
        try:
            for descriptor, path in zip((1, 2), self.paths, strict=True):
                file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
                os.dup2(file, descriptor)
                os.close(file)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (until the process ends)
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            faulthandler.enable()
            body()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def forked(body: Body, log: Path, limit_s: float = 60) -> Ended:
    return Fork(body, log).wait(limit_s)


def share_what_is_imported(body: Body, log: Path) -> Ended:
    """Runs `body` once in a fork, then imports here what it has imported, so that the next forks need not."""

    def listing() -> None:
        try:
            body()
        finally:
            log.with_suffix(".modules").write_text("\n".join(sys.modules))

    ended = forked(listing, log)
    for name in log.with_suffix(".modules").read_text().splitlines():
        if name not in sys.modules and not name.startswith("__"):
            with contextlib.suppress(Exception):
                __import__(name)
    gc.collect()
    gc.freeze()
    return ended


def sample(count: int, most: int, seed: int) -> list[int]:
    """At most so many of the numbers from 1 to `count`, at the same distance from each other."""
    return sorted({1 + (seed + i * count // most) % count for i in range(most)}) if count else []
