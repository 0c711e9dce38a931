"""The n-gram index of a sequence for prompt-lookup drafts, with the hit rate of its drafts."""

from array import array
from dataclasses import dataclass, field

MATCH = 3  # n: tokens that must have occurred before
FIRST_HIT_RATE = 0.3  # assumed of a sequence of which no draft is known to be right or wrong
LEARNING = 0.12  # weight of the newest outcome in a sequence's hit rate
LEAST_RATE = 0.2  # below it, or where nothing matched, a sequence is looked up again after PAUSE tokens
PAUSE, LONGEST_PAUSE = 4, 8  # each pause in a row is a token longer


@dataclass
class NgramIndex:
    """The n-grams of one sequence, and how often its drafts were right."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # MATCH tokens -> the position after the last one
    end: int = MATCH - 1  # the tokens before this position are in `ends`
    rate: float = FIRST_HIT_RATE
    expected: tuple[int, int] | None = None  # a position and the token that a draft would have had there
    pause: int = 0  # the position at which the sequence is looked up again
    length: int = PAUSE  # of the next pause

    def learn(self, right: bool) -> None:
        self.rate += (right - self.rate) * LEARNING

    def look_up(self, ids: "array[int]", most: int) -> "array[int]":
        """Returns the `most` tokens that followed the last n-gram of `ids` where it occurred before, or none. Where
        they reach the end of `ids`, they go on as if the text repeated itself."""
        if self.expected is not None:  # it was not tried: would it have been right?
            position, token = self.expected
            self.learn(ids[position] == token)
            self.expected = None
        new = ids[self.end + 1 - MATCH : -1]
        ngrams = zip(*(new[i:] for i in range(MATCH)), strict=False)
        self.ends.update(zip(ngrams, range(self.end + 1, len(ids)), strict=False))
        self.end = len(ids) - 1
        at = self.ends.get(tuple(ids[-MATCH:]), len(ids))
        if at < len(ids):
            self.expected = len(ids), ids[at]
        if at == len(ids) or self.rate < LEAST_RATE:
            self.pause, self.length = len(ids) + self.length, min(self.length + 1, LONGEST_PAUSE)
        else:
            self.length = PAUSE
        draft = ids[at : at + most]
        while draft and len(draft) < most:
            draft += draft[: most - len(draft)]
        return draft
