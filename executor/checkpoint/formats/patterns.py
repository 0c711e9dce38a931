"""Which modules a format means by the names and patterns in its config: untrusted, so patterns are kept simple."""

import re
from collections.abc import Callable

from errors import UserError

Matches = Callable[[str], object]

# No groups and no choices, so that matching a module's name takes polynomial time at the worst, of a small degree.
SIMPLE = re.compile(r"(?:[\w$^.\-]|\\[.d\-]|\[[\w\-]+\]|\.\*|\.\+|\]\+|d\+|d\*){1,200}")
MOST_STARS = 4


def pattern(text: str, where: str) -> Matches:
    """A regular expression that a module's path must begin with."""
    if not SIMPLE.fullmatch(text) or text.count("*") + text.count("+") > MOST_STARS:
        raise UserError(
            f"{where}: pattern {text!r:.80} is too intricate: names, '.*', '\\d+' and '[0-9]' are understood"
        )
    try:
        return re.compile(text).match
    except re.error as error:
        raise UserError(f"{where}: pattern {text!r:.80}: {error}") from None


def target(text: str, where: str) -> Matches:
    """compressed-tensors': a pattern after "re:", a module's path, or the class of all linear modules."""
    if text.startswith("re:"):
        return pattern(text[3:], where)
    return lambda module: text in ("Linear", module)
