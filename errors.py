"""The one exception that means "the user can mend this": its text is a single line saying what and how."""

import sys
from collections.abc import Callable

EXIT_STATUS = 2


class UserError(Exception):
    """Shown as `error: <text>` with exit status 2. Any other exception is a bug and keeps its traceback."""

    def __init__(self, text: str):
        # A checkpoint's names may hold anything, a terminal's control sequences too.
        super().__init__("".join(c if c.isprintable() else " " for c in text))


def listed(names: list[str], limit: int = 6) -> str:
    """`a, b, c and 12 more`: names for an error line, bounded."""
    more = len(names) - limit
    return ", ".join(f"{name:.200}" for name in names[:limit]) + (f" and {more} more" if more > 0 else "")


def run_main(main: Callable[[list[str]], None]) -> None:
    """The entry point of every command."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_STATUS)
    except KeyboardInterrupt:
        sys.exit(130)
