"""How many threads are worth having."""

from collections.abc import Callable
from fractions import Fraction

PARTS = (Fraction(1, 4), Fraction(1, 2), Fraction(2, 3), Fraction(1))


def worth_having(cores: int, seconds: Callable[[int], float]) -> int:
    """The smallest of a few thread counts that reads memory within 5 % of the fastest speed. `seconds(threads)` is the
    time for a fixed amount. Large machines reach full speed with fewer threads than cores, which leaves cores free."""
    if cores <= 2:
        return cores
    times = {count: seconds(count) for count in sorted({max(1, round(cores * part)) for part in PARTS})}
    return min(count for count, time in times.items() if time <= min(times.values()) / 0.95)
