"""Runs `umbra ARGUMENTS` within this process: the same outcome as in a new process, without the seconds of imports."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import CompletedProcess
from tempfile import TemporaryFile
from typing import IO

from umbra.cli import main


def umbra(*arguments: str) -> "CompletedProcess[str]":
    """Run one command to its end; what it and the processes that it starts print is captured apart from the tests'."""
    argv, status = sys.argv, 0
    sys.argv = ["umbra", *arguments]
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        try:
            with _replaced("stdout", 1, out), _replaced("stderr", 2, err):
                main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.argv = argv
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return CompletedProcess(["umbra", *arguments], status, *texts)


@contextmanager
def _replaced(name: str, descriptor: int, file: "IO[str]") -> Iterator[None]:
    """Both Python's stream and the descriptor under it, which started processes inherit."""
    stream, kept = getattr(sys, name), os.dup(descriptor)
    stream.flush()
    os.dup2(file.fileno(), descriptor)
    setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False))  # noqa: SIM115 (the next lines put it back)
    try:
        yield
    finally:
        getattr(sys, name).flush()
        setattr(sys, name, stream)
        os.dup2(kept, descriptor)
        os.close(kept)
