"""Which of the calls that can be made to fail are tried."""


def sample(count: int, most: int, seed: int) -> list[int]:
    """At most so many of the numbers from 1 to `count`, at the same distance from each other."""
    return sorted({1 + (seed + i * count // most) % count for i in range(most)}) if count else []
