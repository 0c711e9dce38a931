"""The folder of one run, `results/<case>/<time>/`, and the logs in it."""

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from umbra.base.errors import UserError
from umbra.base.files import WORK


def create_results(case_name: str, root: Path | None = None) -> Path:
    """Creates a new folder; a run that starts within the same second as another gets a number appended."""
    parent = (root or WORK / "results") / case_name
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


def share_results(case_name: str, name: str, root: Path | None = None) -> Path:
    """The folder with the name that node 0 has given to its own. Nodes may have one file system or each its own."""
    folder = (root or WORK / "results") / case_name / Path(name).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be created: {error.strerror}") from None
    return folder


def discard_results(folder: Path) -> None:
    """Remove the folder after bad input, unless it contains more than logs and cases. Other nodes may do the same."""
    with contextlib.suppress(FileNotFoundError):
        if all(p.suffix == ".log" or p.match("case*.json") for p in folder.iterdir()):
            shutil.rmtree(folder)


class Log:
    """The file that a rank's output is copied to; unbuffered, so that a write cannot fail later."""

    def __init__(self, path: Path):
        self.path, self.full = path, False
        try:
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115 (until the end)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None

    def write(self, text: str, loud: bool = True) -> None:
        """Append `text`. The first failure raises an error if `loud`; after it, nothing more is written here, so that
        the rest of the run's output, its error line included, reaches the terminal."""
        if self.full:
            return
        rest = memoryview(text.encode(errors="backslashreplace"))
        try:
            while rest:  # while a disk fills up, a write may take only a part
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            if loud:
                self.full = True
                raise UserError(f"{self.path}: cannot be written: {error.strerror}") from None


class Tee:
    """A terminal stream that also writes to a log. Its other attributes are the terminal's, so progress bars work."""

    def __init__(self, terminal: TextIO, log: Log, loud: bool):
        self.terminal, self.log, self.loud = terminal, log, loud

    def write(self, text: str) -> int:
        if not text.startswith("\r"):  # skip a progress bar that redraws itself
            self.log.write(text, self.loud)
        return self.terminal.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def open_log(folder: Path, rank: int) -> Log:
    """Redirects this rank's output to `rank<N>.log`; that of rank 0 goes to the terminal as well."""
    log = Log(folder / f"rank{rank}.log")
    if rank == 0:
        # Text on stderr may be the error that this disk is full, so it must reach the terminal if the log fails.
        sys.stdout, sys.stderr = Tee(sys.stdout, log, loud=True), Tee(sys.stderr, log, loud=False)
    else:  # the file descriptors themselves, so that messages of crashing native code are in the log too
        os.dup2(log.file.fileno(), 1)
        os.dup2(log.file.fileno(), 2)
    return log
