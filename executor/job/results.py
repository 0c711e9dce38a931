"""The folder of one run, `results/<case>/<time>/`, and what is written there."""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from errors import UserError
from files import ROOT


def create_results(case_name: str, root: Path | None = None) -> Path:
    """A new folder; a run that starts within the same second gets a number of its own."""
    parent = (root or ROOT / "results") / case_name
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1, 1000):
        folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{folder}: cannot be created: {error.strerror}") from None
    raise UserError(f"{parent}: a thousand runs in one second")


def discard_results(folder: Path) -> None:
    """After bad input: take the folder back, unless it holds more than the logs that say so."""
    if all(p.suffix == ".log" for p in folder.iterdir()):
        shutil.rmtree(folder)


class Log:
    """The file that keeps what a rank prints. Unbuffered, so that nothing is left to fail later."""

    def __init__(self, path: Path):
        self.path, self.full = path, False
        try:
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115 (until the end)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None

    def write(self, text: str, loud: bool = True) -> None:
        """Fails once, when `loud`; what is left of the run, its error line too, goes to the terminal alone."""
        if self.full:
            return
        rest = memoryview(text.encode(errors="backslashreplace"))
        try:
            while rest:  # a disk that fills up takes a part first
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            if loud:
                self.full = True
                raise UserError(f"{self.path}: cannot be written: {error.strerror}") from None


class Tee:
    """A terminal stream that also fills a log; still a terminal to whoever asks, so progress bars work."""

    def __init__(self, terminal: TextIO, log: Log, loud: bool):
        self.terminal, self.log, self.loud = terminal, log, loud

    def write(self, text: str) -> int:
        if not text.startswith("\r"):  # a progress bar redrawing itself
            self.log.write(text, self.loud)
        return self.terminal.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def open_log(folder: Path, rank: int) -> Log:
    """Sends what this rank prints to `rank<N>.log`; rank 0 keeps the terminal as well."""
    log = Log(folder / f"rank{rank}.log")
    if rank == 0:
        # What comes by stderr is a complaint already, perhaps of this very disk: it must reach the terminal.
        sys.stdout, sys.stderr = Tee(sys.stdout, log, loud=True), Tee(sys.stderr, log, loud=False)
    else:  # the descriptors themselves, so that native code's last words land there too
        os.dup2(log.file.fileno(), 1)
        os.dup2(log.file.fileno(), 2)
    return log
