"""The names and patterns by which a config selects modules. They are untrusted, so only simple patterns are taken."""

import re
from collections.abc import Callable, Iterable

from umbra.base.errors import UserError

Matches = Callable[[str], object]

# What patterns are made of. A repetition is never repeated itself, since nothing may follow a closing bracket but the
# rest of the pattern; so matching takes polynomial time of a small degree in each of a few alternatives.
TOKEN = re.compile(r"\(\?:|[()|]|(?:\.|\\[dw]|\[[\w\-]+\])[*+]|[\w$^.\-]|\\[.bdw\-]|\[[\w\-]+\]")
LONGEST = 200  # characters of a pattern
MOST_PATTERNS = 1000  # of a config
MOST_REPEATS = 4  # in one alternative
MOST_ALTERNATIVES = 32  # of the whole pattern, groups multiplied out


def pattern(text: str, where: str, anywhere: bool = False) -> Matches:
    """A function that says whether a module's path begins with a match of the regular expression `text`, or has one
    `anywhere`."""
    tokens = TOKEN.findall(text[: LONGEST + 1])
    if len(text) > LONGEST or "".join(tokens) != text or not _bounded(tokens):
        raise UserError(
            f"{where}: pattern {text!r:.80} is too intricate: names, '.*', '\\d+', '[0-9]' and a few alternatives in "
            "round brackets are understood"
        )
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise UserError(f"{where}: pattern {text!r:.80}: {error}") from None
    return compiled.search if anywhere else compiled.match


def _bounded(tokens: Iterable[str]) -> bool:
    """Returns whether brackets match and there are few alternatives and repetitions."""
    # For the pattern and each open bracket: alternatives and most repetitions of the branches before the last "|", and
    # those of the branch that is being read.
    levels = [(0, 0, 1, 0)]
    for token in tokens:
        ways, most, here, repeats = levels[-1]
        if token in ("(", "(?:"):
            levels.append((0, 0, 1, 0))
        elif token == "|":
            levels[-1] = ways + here, max(most, repeats), 1, 0
        elif token == ")" and len(levels) > 1:
            levels.pop()
            outer = levels[-1]
            levels[-1] = *outer[:2], outer[2] * (ways + here), outer[3] + max(most, repeats)
        elif token == ")":
            return False
        elif len(token) > 1 and token[-1] in "*+":
            levels[-1] = ways, most, here, repeats + 1
        if sum(levels[-1][::2]) > MOST_ALTERNATIVES or levels[-1][3] > MOST_REPEATS:
            return False
    return len(levels) == 1


def inside(names: Iterable[str]) -> Callable[[str], bool]:
    """A function that says whether one of `names` names a module or one that it is in, by whole parts of its path."""
    runs = {name.strip(".") for name in names}

    def matches(module: str) -> bool:
        parts = module.split(".")
        ends = range(1, len(parts) + 1)
        return any(".".join(parts[start:end]) in runs for end in ends for start in range(end))

    return matches


def target(text: str, where: str) -> Matches:
    """A function for a target of compressed-tensors: a pattern after "re:", a module's path, or "Linear" for all."""
    if text.startswith("re:"):
        return pattern(text[3:], where)
    return lambda module: text in ("Linear", module)


def vagueness(text: str) -> int:
    """The order in which targets of compressed-tensors decide: paths, then patterns, then classes."""
    return 1 if text.startswith("re:") else 2 * (text == "Linear")
