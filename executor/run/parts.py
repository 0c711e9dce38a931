"""The lines of a memory plan."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Part:
    """One line: what takes memory, and how much. `how` is the arithmetic behind `nbytes`."""

    name: str
    nbytes: int
    how: str = ""


def product(name: str, **factors: int) -> Part:
    """A part whose bytes are the product of `factors`, which are printed by their names."""
    how = " x ".join(f"{value:,} {factor.replace('_', ' ')}" for factor, value in factors.items())
    return Part(name, prod(factors.values()), how)
