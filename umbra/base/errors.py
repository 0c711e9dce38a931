"""UserError, the exception for errors that the user can correct: its text is one line that says what is wrong and how
to correct it.
"""

import atexit
import errno
import gc
import os
import re
import reprlib
import sys
from collections.abc import Callable

EXIT_STATUS = 2
REFUSED_STATUS = 1
NO_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes|^std::bad_alloc$")
NO_NPU_MEMORY = re.compile(r"NPU out of memory\. Tried to allocate (\S+ \S+)")
# What torch_npu says if CANN refuses a call or a kernel fails; lost connections (ERR02 DIST) are another matter.
NPU = re.compile(r"ERR\d{5} (PTA|OPS|GRAPH)|NPU function error|ACL \w+ synchronize failed|\baclrt\w+: error \d+$")
OF_EXPERTS = re.compile(r"^layer \d+, step \d+: [^:]+: ")  # what a step with shadow experts says first
NO_THREAD = re.compile("can't start new thread|Resource temporarily unavailable$")  # Python's text; C++'s
LONGEST = 2000  # characters of an error
YOUNG = 50_000  # new objects between two looks for garbage
_REPR = reprlib.Repr()
_REPR.maxstring = 80


class UserError(Exception):
    """Shown as `error: <text>` with exit status 2. What the machine refuses (`refusal`) is one line too, with exit
    status 1; any other exception is a bug and keeps its traceback."""

    def __init__(self, text: str):
        super().__init__(one_line(text))


def one_line(text: str) -> str:
    """`text` without line breaks and other control characters, and without the middle if it is too long: names from a
    checkpoint or a request may have anything in them."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 + 5 :]}"
    return "".join(c if c.isprintable() else " " for c in text)


def refusal(error: BaseException) -> str:
    """The line of an error for what the system refused: memory, a file, a thread, a connection, a call to the NPU.
    Empty for other errors. A retry may succeed, so a server restarts after it; after a UserError it does not."""
    refused = NO_MEMORY.search(str(error))
    if isinstance(error, MemoryError) or refused:
        size = f"of {refused[1]} bytes " if refused and refused[1] else ""
        return (
            f"out of memory: an allocation {size}was refused: end other programs, or lower batch_size or input_max_len"
        )
    if isinstance(error, RuntimeError) and (wanted := NO_NPU_MEMORY.search(str(error))):
        return f"out of memory: the NPU has no {wanted[1]} left: lower batch_size or input_max_len, or use more ranks"
    if isinstance(error, RuntimeError) and NPU.search(str(error)):
        # The first line is torch_npu's, the first one after its code is CANN's.
        said, _, cann = str(error).partition("[ERROR]")
        where = "".join(OF_EXPERTS.findall(said))
        said = (
            where + said[max(said.find("NPU function error"), len(where)) :]
        )  # without a place in torch_npu's sources
        reasons = [said.strip().partition("\n")[0], *cann.strip().split("\n")[1:2]]
        why = "; ".join(reason[:500] for reason in reasons if reason)
        return one_line(f"the NPU failed: {why} (the rank's log has the stack, ~/ascend/log what the device did)")
    if isinstance(error, RuntimeError) and NO_THREAD.search(str(error)):
        why = os.strerror(errno.EAGAIN)
        return f"a thread cannot be started: {why}: end other programs, or raise the limits of processes and threads"
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return str(UserError(": ".join([" to ".join(names), error.strerror] if names else [error.strerror])))
    return str(UserError(str(error))) if isinstance(error, OSError) else ""


def listed(names: list[str], limit: int = 6) -> str:
    """Names for an error line, at most `limit` of them: `a, b, c and 12 more`."""
    more = len(names) - limit
    return ", ".join(f"{name:.200}" for name in names[:limit]) + (f" and {more} more" if more > 0 else "")


def short(value: object) -> str:
    """`value` abbreviated for an error line, however long or deeply nested it is."""
    return _REPR.repr(value)


def collect_seldom() -> None:
    """What a program imports stays to its end, and is a million objects. With Python's own settings they are looked
    through for garbage again and again, which takes as long as `import torch` itself: half of it while the program
    starts, half when it ends."""
    gc.set_threshold(YOUNG)
    atexit.register(gc.freeze)


def run_main(main: Callable[[list[str]], None]) -> None:
    """Runs `main`, the entry point of a command, and turns UserError into an error line and exit status 2, and what the
    system refused into one and exit status 1."""
    collect_seldom()
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_STATUS)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not (line := refusal(error)):
            raise
        print(f"error: {line}", file=sys.stderr)
        sys.exit(REFUSED_STATUS)
