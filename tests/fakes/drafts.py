"""Drafts whose choice does not depend on how fast this machine is."""

from typing import Any

from executor.engine.drafts import Drafts


def lookup(most: int) -> dict[str, Any]:
    """draft_config with at most so many tokens of prompt lookup."""
    return {"method": "lookup", "tokens": most} if most else {}


class FreeDrafts(Drafts):
    """Believes that every decode step takes a second, however many rows it has, and that guesses take no time: whatever
    may be drafted is."""

    def __init__(self, most: int):
        super().__init__(most)
        for rows in (1, 256, 1, 256):  # a size counts from the second time on
            self.took(rows, 1.0)

    def took(self, rows: int, seconds: float) -> None:
        super().took(rows, 1.0)

    def guessed(self, rows: int, sequences: int, depth: int, seconds: float) -> None:
        super().guessed(rows, sequences, depth, 0.0)
