"""A process for what could take endless time or memory, so that it can be ended.

Its program is a module of ours. Questions go to its standard input and answers come from its standard output, each as a
length of four bytes and that many bytes. It ends when its standard input is closed, as it is when this process ends.
"""

import contextlib
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO, cast

from umbra.base.files import WORK

HEADER = struct.Struct("<I")
GRACE_S = 0.1  # in which the process ends by itself when nobody asks it any more


class Ended(Exception):
    """The process has ended, with this status, before it answered."""

    def __init__(self, status: int):
        self.status = status


class Sandbox:
    """The program `module`, which first gets the message `setup` if it is not empty. After Ended, the next question
    starts the program again."""

    def __init__(self, module: str, setup: bytes = b""):
        self.module, self.setup = module, setup
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def answer(self, question: bytes) -> bytes:
        """Asks as `ask` does, for any thread, and once more if somebody has killed the program."""
        with self._lock:
            for _ in range(2):
                with contextlib.suppress(Ended):
                    return self.ask(question)
        raise RuntimeError(f"the process of {self.module} does not stay alive")

    def ask(self, question: bytes) -> bytes:
        """Not for several threads at once."""
        fresh = not self.process
        if not self.process:
            command = [sys.executable, "-m", self.module]
            self.process = subprocess.Popen(
                command, cwd=WORK, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            self._end = weakref.finalize(self, _end, self.process)
        to, answers = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)
        try:
            if fresh and self.setup:
                write(to, self.setup)
            write(to, question)
            return read(answers)
        except (OSError, EOFError):
            raise Ended(self.close()) from None

    def close(self) -> int:
        """The status of the process, which is ended unless it has ended."""
        if not self.process:
            return 0
        self.process = None
        return cast(int, self._end())


def _end(process: "subprocess.Popen[bytes]") -> int:
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # of a question that nobody has read
            cast(IO[bytes], stream).close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(GRACE_S)
    process.kill()
    return process.wait()


def write(stream: IO[bytes], data: bytes) -> None:
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def read(stream: IO[bytes]) -> bytes:
    """The next message. Raises EOFError if there is none."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (size,) = HEADER.unpack(header)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def tried(work: Callable[[], bytes], seconds: float, memory: int) -> bytes | None:
    """Runs `work` in a fork of this process and returns its result, which has a single thread; None if it takes more
    than so many seconds of a processor or so many bytes, or ends in any other way. What it says on standard error is
    lost."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.close(2)
            limit(seconds, memory)
            with open(writing, "wb") as stream:
                stream.write(work())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as stream:
        answer = stream.read()
    return None if os.waitpid(child, 0)[1] else answer


def limit(seconds: float, memory: int) -> None:
    """A signal ends this process when it has taken so many more seconds of a processor."""
    limit_memory(memory)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(more: int) -> None:
    """This process may take `more` bytes beyond what it has, and writes no image of its memory when it fails."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
