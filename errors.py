"""UserError, the exception for errors that the user can correct: its text is one line that says what is wrong and how
to correct it.
"""

import atexit
import gc
import sys
from collections.abc import Callable

EXIT_STATUS = 2
YOUNG = 50_000  # new objects between two looks for garbage


class UserError(Exception):
    """Shown as `error: <text>` with exit status 2. Any other exception is a bug and keeps its traceback."""

    def __init__(self, text: str):
        # Names from a checkpoint may contain anything, such as a terminal's control sequences.
        super().__init__("".join(c if c.isprintable() else " " for c in text))


def listed(names: list[str], limit: int = 6) -> str:
    """Names for an error line, at most `limit` of them: `a, b, c and 12 more`."""
    more = len(names) - limit
    return ", ".join(f"{name:.200}" for name in names[:limit]) + (f" and {more} more" if more > 0 else "")


def collect_seldom() -> None:
    """What a program imports stays to its end, and is a million objects. With Python's own settings they are looked
    through for garbage again and again, which takes as long as `import torch` itself: half of it while the program
    starts, half when it ends."""
    gc.set_threshold(YOUNG)
    atexit.register(gc.freeze)


def run_main(main: Callable[[list[str]], None]) -> None:
    """Runs `main`, the entry point of a command, and turns UserError into an error line and exit status 2."""
    collect_seldom()
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_STATUS)
    except KeyboardInterrupt:
        sys.exit(130)
