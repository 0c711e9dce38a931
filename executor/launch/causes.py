"""Why a job ended, by what its ranks have left."""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from umbra.base.errors import EXIT_STATUS, UserError
from umbra.executor.platform.registry import lost_another_rank

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class Cause(msgspec.Struct, frozen=True):
    """Why a launcher ends the job."""

    text: str
    status: int = 1
    follows: bool = False  # its ranks have lost others; whether that is the reason, other nodes know


def cause_of(
    failures: "Mapping[int, ProcessFailure]", results: Path, known: Mapping[int, str], node: str = ""
) -> Cause:
    """Why the job ended, as far as the failures of the ranks of this `node` tell; the stack of an exception is printed
    here. `known` has reasons by process id."""
    rank, failure = _first_of(failures)
    message, stack, follows = _words(failure.error_file_data)
    if failure.exitcode == EXIT_STATUS and message:
        return Cause(str(UserError(message)), EXIT_STATUS)
    how = f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
    how = known.get(failure.pid, how)
    follows = follows or (failure.pid not in known and failure.exitcode in (-signal.SIGABRT, -signal.SIGTERM))
    if cause := stack.splitlines()[-1] if stack else message:
        if stack:  # a bug; what the system refused says nothing of the code
            print(stack, file=sys.stderr)
        follows = follows or lost_another_rank(stack)
        how += f": {UserError(cause)!s:.300}"
    who = f"rank {rank} (pid {failure.pid})" + (f" on {node}" if node else "")
    logs = "logs on each node" if node else "all ranks' logs"
    return Cause(f"{who} failed: {how}; {logs}: {results}", follows=follows)


def _words(data: Any) -> tuple[str, str, bool]:
    """The message and the stack that a rank has left, as _leave_word of rank.py writes them, and whether it failed only
    because another one was gone; empty if it has left none."""
    record = data.get("message") if isinstance(data, dict) else None
    message = record.get("message") if isinstance(record, dict) else None
    extra = record.get("extraInfo") if isinstance(record, dict) else None
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    follows = isinstance(extra, dict) and extra.get("follows") is True
    return message if isinstance(message, str) else "", stack.strip() if isinstance(stack, str) else "", follows


def _first_of(failures: "Mapping[int, ProcessFailure]") -> "tuple[int, ProcessFailure]":
    """The rank whose failure ended the job, and that failure; the other ranks failed because of it.

    A rank that died without writing an error (killed, out of memory, crashed in native code) comes first, then the
    rank that wrote its error earliest. A rank writes its error before its connections close, so the modification times
    of the error files are in the order of cause and effect. The timestamps inside them are whole seconds, which is too
    coarse. Ranks that gloo aborted because another rank was gone, and ranks that were stopped after the failure, come
    last.
    """

    def order(item: "tuple[int, ProcessFailure]") -> tuple[int, float]:
        failure = item[1]
        if Path(failure.error_file).is_file():
            return 1, os.stat(failure.error_file).st_mtime_ns
        wake = {-signal.SIGABRT: 2, -signal.SIGTERM: 3}
        return wake.get(failure.exitcode, 0), failure.timestamp

    return min(failures.items(), key=order)
