"""The n-gram index of a sequence for prompt-lookup drafts, with the hit rate of its drafts."""

from array import array
from dataclasses import dataclass, field

MATCH = 3  # n: tokens that must have occurred before
FIRST_HIT_RATE = 0.3  # assumed of a sequence of which no draft is known to be right or wrong
LONG_MATCH, NEAR = 6, 1024  # tokens that must have occurred among so many last ones for an index to be made at all
LEARNING = 0.12  # weight of the newest outcome in a sequence's hit rate


@dataclass
class NgramIndex:
    """The n-grams of one sequence, and how often its drafts were right."""

    ends: dict[bytes, int] = field(default_factory=dict)  # MATCH tokens -> the position after the last ones
    end: int = MATCH  # the n-grams before this position are in `ends`
    rate: float = FIRST_HIT_RATE

    def look_up(self, ids: "array[int]", most: int) -> "array[int]":
        """Returns the `most` tokens that followed the last n-gram of `ids` where it occurred before, or none. Where
        they reach the end of `ids`, they go on as if the text repeated itself. Learns from all tokens since the last
        look-up, drafted or not."""
        first, ends, size = self.end, self.ends, MATCH * ids.itemsize
        text = ids[first - MATCH :].tobytes()
        for end in range(first, len(ids)):
            start = (end - first) * ids.itemsize
            ngram = text[start : start + size]
            if at := ends.get(ngram):
                self.rate += ((ids[at] == ids[end]) - self.rate) * LEARNING
            ends[ngram] = end
        self.end = max(first, len(ids))
        begin = ends.get(text[-size:], len(ids))
        draft = ids[begin : begin + most]
        while draft and len(draft) < most:
            draft += draft[: most - len(draft)]
        return draft


def recurs(ids: "array[int]") -> bool:
    """Returns whether the last LONG_MATCH tokens occurred shortly before. This costs less than a look-up, and says
    whether one may be worth it."""
    return ids[-NEAR:-1].tobytes().rfind(ids[-LONG_MATCH:].tobytes()) >= 0
