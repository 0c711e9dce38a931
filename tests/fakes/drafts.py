"""Drafts whose choice does not depend on how fast this machine is."""

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import Any

from umbra.executor.engine.drafts.drafts import DecodeCost, Drafts
from umbra.executor.engine.schedule.sequence import Sequence


def lookup(most: int) -> dict[str, Any]:
    """draft_config with at most so many tokens of prompt lookup."""
    return {"method": "lookup", "tokens": most} if most else {}


class FreeDrafts(Drafts[Sequence]):
    """Believes that every decode step takes a second, however many rows it has, and that guesses take no time: whatever
    may be drafted is."""

    def __init__(self, most: int):
        super().__init__(most)
        for rows in (1, 256, 1, 256):  # a size counts from the second time on
            self.took(DecodeCost(rows, 1.0))

    def took(self, cost: DecodeCost) -> None:
        super().took(DecodeCost(cost.rows, 1.0, cost.guessed._replace(seconds=0.0)))


class HalfRight(FreeDrafts):
    """Right ones in place of half of the guesses, which random weights seldom make; `seen` are those that were made."""

    def __init__(self, texts: ListOf[list[int]]):
        super().__init__(3)
        self.texts, self.seen = texts, dict[tuple[int, ...], list[int]]()

    def propose(self, sequences: ListOf[Sequence], room: Callable[[Sequence], int]) -> None:
        for s in sequences:
            self.seen[tuple(s.ids)] = s.guesses.tolist()
            if len(s.ids) % 2:
                text = next(text for text in self.texts if text[: len(s.ids)] == s.ids.tolist())
                s.guesses = s.guesses[:0] + type(s.guesses)("q", text[len(s.ids) :][: len(s.guesses)])
        super().propose(sequences, room)


class Told(FreeDrafts):
    """Drafts the next tokens of `texts`, of which every other time the last is wrong."""

    def __init__(self, most: int, texts: ListOf[list[int]]):
        super().__init__(most)
        self.texts = texts

    def propose(self, sequences: ListOf[Sequence], room: Callable[[Sequence], int]) -> None:
        for s in sequences:
            text = next(text for text in self.texts if text[: len(s.ids)] == s.ids.tolist())
            s.guesses = s.guesses[:0] + type(s.guesses)("q", text[len(s.ids) :][: self.most])
            if s.guesses and len(s.ids) % 2:
                s.guesses[-1] = (s.guesses[-1] + 1) % 90
        super().propose(sequences, room)
