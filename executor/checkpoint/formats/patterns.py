"""The names and patterns by which a config selects modules. They are untrusted, so only simple patterns are taken."""

import re
from collections.abc import Callable

from errors import UserError

Matches = Callable[[str], object]

# No groups and no alternatives, so that matching takes polynomial time of a small degree at worst.
SIMPLE = re.compile(r"(?:[\w$^.\-]|\\[.d\-]|\[[\w\-]+\]|\.\*|\.\+|\]\+|d\+|d\*){1,200}")
MOST_STARS = 4


def pattern(text: str, where: str) -> Matches:
    """A function that says whether a module's path begins with a match of the regular expression `text`."""
    if not SIMPLE.fullmatch(text) or text.count("*") + text.count("+") > MOST_STARS:
        raise UserError(
            f"{where}: pattern {text!r:.80} is too intricate: names, '.*', '\\d+' and '[0-9]' are understood"
        )
    try:
        return re.compile(text).match
    except re.error as error:
        raise UserError(f"{where}: pattern {text!r:.80}: {error}") from None


def target(text: str, where: str) -> Matches:
    """A function for a target of compressed-tensors: a pattern after "re:", a module's path, or "Linear" for all."""
    if text.startswith("re:"):
        return pattern(text[3:], where)
    return lambda module: text in ("Linear", module)
