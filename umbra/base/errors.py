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
NO_THREAD = re.compile("can't start new thread|Resource temporarily unavailable$")  # Python's text; C++'s
LONGEST = 2000  # characters of an error
YOUNG = 50_000  # new objects between two looks for garbage
# For each device that this process uses: the function that returns the line for what the device refused, or nothing.
REFUSALS: dict[str, Callable[[RuntimeError], str]] = {}
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
    """The line of an error for what the system refused: memory, a file, a thread, a connection, a call to
    a device. Empty for other errors. A retry may succeed, so a server restarts after it; after a UserError it does
    not."""
    refused = NO_MEMORY.search(str(error))
    if isinstance(error, MemoryError) or refused:
        size = f"of {refused[1]} bytes " if refused and refused[1] else ""
        return (
            f"out of memory: an allocation {size}was refused: end other programs, or lower batch_size or input_max_len"
        )
    if isinstance(error, RuntimeError) and (
        line := next(filter(None, (line_of(error) for line_of in REFUSALS.values())), "")
    ):
        return line
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
    """Makes garbage collection rare. A program's imports are a million objects that stay to its end, and with Python's
    own settings collecting them again and again takes as long as `import torch` itself: half of it while the program
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
