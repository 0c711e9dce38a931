"""Speculative decoding: guesses the next tokens of sequences, so that one decode step checks several.

A draft comes from one of two sources, whichever is likelier to be right. Prompt lookup takes the tokens that followed
the last ones of a sequence where these occurred before, in its prompt or its answer. A draft model (a layer for
multi-token prediction or an EAGLE3 head, step/model_drafts.py) guesses tokens after each step. A step computes the
drafted tokens as further rows. Each row's token is chosen as always, from its logits and its position's random number,
and a draft counts as far as it agrees. So the tokens are those of a run without drafts, sampled ones as well.

A step has drafts only if that pays: for each number of rows, the expected tokens are divided by the seconds that steps
of so many rows have taken. The share of drafts that come true is learned from each sequence, also while none are
tried, because the next tokens show whether a draft would have been right; for guesses it is learned by position. If
look-ups do not pay, they rest, so that they cost a small part of the time, and resume where a longer text recurs. The
number of guessed tokens is chosen in the same way, with the seconds that guessing takes. If no draft length pays, one
is still tried for a small share of the time; between such trials, steps are those of a run without guesses. The draft
model's cache then misses tokens of running sequences, so a trial starts with a new one, and nothing is guessed for the
others.
"""

import bisect
import itertools
import operator
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from typing import Generic, NamedTuple, Protocol, TypeVar

from umbra.executor.config.case import MOST_DRAFTING
from umbra.executor.engine.drafts.ngrams import NgramIndex, recurs

MARGIN = 1.03  # how much better a step with drafts must be expected to be
ASSUMED_ROW = 0.5  # cost of each further row, as a part of a step's, as long as no step had so many rows
FORGET_STEPS = 2000  # numbers of rows that no step has had for so long are measured again
MEASURED = 16  # of so many steps without drafts and guesses one is measured
STALE_STEPS = 100  # a step has no drafts if none was without them for so long, to learn again what it costs
LOOKING = 2e-5  # seconds that finding drafts takes, for each sequence of a step
TRIED = 0.005  # how much of the time look-ups may cost, and guesses, that do not pay, to learn whether they do
MOST_TRIED = 4.0  # most unprofitable guesses in a row, in steps
FIRST_RATE = 0.6  # how often a guess comes true if those before it do, as long as none was checked
LEARNING = 0.05  # weight of the newest outcome in that
FIRST_WEIGHT = 4  # of a sequence: what is known of all others counts as much as this number of its own outcomes
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # numbers of rows of steps with drafts


class DraftMatcher(Protocol):
    def followed(self, draft: ListOf[int]) -> int:
        """Returns how many of a draft's first tokens follow a grammar."""
        ...


class Drafted(Protocol):
    """The part of a sequence that drafts read and write (executor/engine/schedule/sequence.py)."""

    ids: "array[int]"
    drafted: int
    guesses: "array[int]"
    rates: list[float]
    checked: int

    @property
    def ngrams(self) -> NgramIndex: ...

    @property
    def matcher(self) -> DraftMatcher | None: ...


class Guessed(NamedTuple):
    """The extent of the guesses of a draft model after a step."""

    sequences: int = 0
    depth: int = 0  # tokens of each of them
    seconds: float = 0.0  # that this took


class DecodeCost(NamedTuple):
    """The cost of a decode step."""

    rows: int
    seconds: float  # without guessing
    guessed: Guessed = Guessed()


AnyDrafted = TypeVar("AnyDrafted", bound=Drafted)


class Drafts(Generic[AnyDrafted]):
    """`most` is the largest number of drafted tokens of a sequence in a step."""

    def __init__(self, most: int):
        self.most = most
        self._rows = 0  # of the next step, if it is to have so many whatever pays
        self._seconds: dict[int, float] = {}  # of decode steps by their number of rows, in all groups
        self._measured: dict[int, int] = {}  # the step in which it was last measured
        self._captured: set[tuple[int, ...]] = set()  # sizes that a step had before; the first one takes longer
        self._steps, self._kept_until = 0, FORGET_STEPS
        self._guessing: dict[int, float] = {}  # seconds of one guess for each of so many sequences
        self._rates = [FIRST_RATE] * most  # of guesses of all sequences, by position
        self._skipped, self._next_look = 0.0, 0.0  # steps without look-ups, and the step of the next ones
        self.guesses = False  # whether tokens are guessed
        self.measures = False  # whether the step is measured if it has neither drafts nor guesses
        self._left = MOST_TRIED  # unprofitable guesses that are still allowed, in steps

    def due(self) -> bool:
        """Returns whether the next step may have drafts. It is called before every decode step."""
        self._steps += 1
        self._left += TRIED
        self.measures = self._steps % MEASURED == 0
        return self.guesses or self._steps >= self._next_look

    def propose(self, sequences: ListOf[AnyDrafted], room: Callable[[AnyDrafted], int]) -> None:
        """Appends drafts to `sequences`, which take one token each in the next step; `room` is the largest number of
        drafted tokens of each."""
        if self._rows:
            return self._fill(sequences, room)
        measured = self._measured.setdefault(len(sequences), self._steps + MEASURED - STALE_STEPS)
        if self._steps - measured > STALE_STEPS:
            self.measures = True
            return None
        looking = self._steps >= self._next_look
        drafted: list[tuple[AnyDrafted, int]] = []
        chances: list[tuple[float, int]] = []
        for sequence in sequences:
            draft = array("q")
            if looking and (self._skipped <= 1 or recurs(sequence.ids)):
                draft = sequence.ngrams.look_up(sequence.ids, self.most)
            if not (draft or sequence.guesses) or (most := min(room(sequence), self.most)) < 1:
                continue
            draft = draft[:most]
            likely = [sequence.ngrams.rate ** (i + 1) for i in range(len(draft))]
            guessed = list(itertools.accumulate(self._rates_of(sequence)[: len(sequence.guesses[:most])], operator.mul))
            if sum(likely) < sum(guessed):
                draft, likely = sequence.guesses[:most], guessed
            if sequence.matcher:
                draft = draft[: sequence.matcher.followed(draft)]
            for token, chance in zip(draft, likely, strict=False):
                chances.append((-chance, len(drafted)))
                drafted.append((sequence, token))
        chances.sort()
        taken = self._worth(len(sequences), [-chance for chance, _ in chances]) if chances else 0
        if looking:
            longest = LOOKING * len(sequences) / (TRIED * self._cost(len(sequences)))
            self._skipped = 0.0 if taken else min(2 * self._skipped + 1, longest)
            self._next_look = self._steps + self._skipped
        for _, index in chances[:taken]:
            sequence, token = drafted[index]
            sequence.ids.append(token)
            sequence.drafted += 1

    def fill(self, rows: int) -> None:
        """Makes the next step have `rows` rows of dummy drafts, to capture a graph of that size."""
        self._rows, self._next_look = rows, 0

    def _fill(self, sequences: ListOf[AnyDrafted], room: Callable[[AnyDrafted], int]) -> None:
        wanted, self._rows = self._rows - len(sequences), 0
        for number in range(self.most):
            for sequence in sequences:
                if wanted > 0 and number < room(sequence):
                    sequence.ids.append(sequence.ids[-1])
                    sequence.drafted += 1
                    wanted -= 1

    def _worth(self, rows: int, chances: list[float]) -> int:
        """Returns how many of the drafted tokens to take, which come true with probabilities `chances`, the largest
        first, besides `rows` tokens that are certain."""
        best, taken, expected, added = rows / self._cost(rows) * MARGIN, 0, float(rows), 0
        for size in SIZES[bisect.bisect_right(SIZES, rows) :]:
            if size - rows > len(chances):
                break
            expected += sum(chances[added : size - rows])
            added = size - rows
            if (worth := expected / (self._cost(size) + LOOKING * rows)) > best:
                best, taken = worth, added
        return taken

    def _cost(self, rows: int) -> float:
        """Seconds of a step with so many rows: measured, between two that were, or assumed; no longer than those of
        fewer rows each would take, since the first steps of a size may take long for other reasons."""
        return min([self._known(rows), *(s * rows / n for n, s in self._seconds.items() if n < rows)])

    def _known(self, rows: int) -> float:
        if rows in self._seconds or not self._seconds:
            return self._seconds.get(rows, 1.0)
        known = sorted(self._seconds)
        at = bisect.bisect(known, rows)
        if 0 < at < len(known):
            low, high = known[at - 1], known[at]
            share = (rows - low) / (high - low)
            return (1 - share) * self._seconds[low] + share * self._seconds[high]
        near = known[0] if at == 0 else known[-1]
        return self._seconds[near] * (1 + ASSUMED_ROW * rows) / (1 + ASSUMED_ROW * near)

    def took(self, cost: DecodeCost) -> None:
        """Learns what a decode step has cost."""
        rows, guessed = cost.rows, cost.guessed
        if self._steps >= self._kept_until:  # what seemed to cost too much is tried again
            self._seconds = {n: s for n, s in self._seconds.items() if self._measured[n] > self._steps - FORGET_STEPS}
            self._kept_until = self._steps + FORGET_STEPS
        if not self._new(rows, guessed.depth > 0):
            _learn(self._seconds, rows, cost.seconds)
            self._measured[rows] = self._steps
        if guessed.depth and not self._new(rows, guessed.sequences, guessed.depth):
            _learn(self._guessing, guessed.sequences, guessed.seconds / guessed.depth)

    def accept(self, sequence: AnyDrafted, chosen: ListOf[int]) -> ListOf[int]:
        """`chosen` has the tokens chosen after the newest token and after each drafted one. Removes the draft from
        the sequence; -> the tokens that are its next ones."""
        ids, drafted = sequence.ids, sequence.drafted
        kept, first = 0, len(ids) - drafted
        while kept < drafted and chosen[kept] == ids[first + kept]:
            kept += 1
        del ids[first:]
        sequence.drafted = 0
        return chosen[: kept + 1]

    def check(self, sequence: AnyDrafted, tokens: ListOf[int]) -> None:
        """Learns from the guesses of a sequence, tried or not, whose next tokens are `tokens`."""
        own = sequence.rates = self._rates_of(sequence)
        newest = max(LEARNING, 1 / (FIRST_WEIGHT + sequence.checked))
        sequence.checked += 1
        for position, (guess, token) in enumerate(zip(sequence.guesses, tokens, strict=False)):
            for rates, weight in ((own, newest), (self._rates, LEARNING)):
                rates[position] += ((guess == token) - rates[position]) * weight
            if guess != token:
                break
        sequence.guesses = array("q")

    def begin(self, count: int) -> None:
        """Lets tokens be guessed again in the next step, of `count` sequences, of which some begin."""
        self.guesses |= count <= MOST_DRAFTING and self._left >= 1

    def depth(self, sequences: ListOf[AnyDrafted], count: int) -> int:
        """Returns the number of tokens to guess for each of `sequences` after a step of `count` sequences, among which
        may be others whose tokens the draft model lacks. 0: nothing is guessed any more."""
        self.guesses = bool(sequences) and count <= MOST_DRAFTING
        if not self.guesses:
            return 0
        taken, guess_s = len(sequences), self._guessing.get(len(sequences), 0.0)
        plain, expected, best, best_depth = count / self._cost(count), float(count), 0.0, 1
        for depth, chance in enumerate(self._chances(sequences), 1):
            expected += chance
            seconds = self._cost(count + taken * depth) + depth * guess_s + LOOKING * count
            if (worth := expected / seconds) > best:
                best, best_depth = worth, depth
        if best <= plain * MARGIN:
            self._left = min(self._left, MOST_TRIED) - max(0.0, 1 - best / plain)
            self.guesses = self._left > 0
        return best_depth if self.guesses else 0

    def _rates_of(self, sequence: AnyDrafted) -> list[float]:
        """Returns the share of guesses for a sequence that come true, by position; before its first guess, the shares
        for all sequences."""
        return sequence.rates or self._rates.copy()

    def _chances(self, sequences: ListOf[AnyDrafted]) -> Iterator[float]:
        """For each position of a draft, how many guesses for `sequences` can be expected to come true."""
        running, rates = [1.0] * len(sequences), [self._rates_of(s) for s in sequences]
        for position in range(self.most):
            running = [chance * of[position] for chance, of in zip(running, rates, strict=True)]
            yield sum(running)

    def _new(self, *size: int) -> bool:
        known = size in self._captured
        self._captured.add(size)
        return not known


def _learn(times: dict[int, float], size: int, seconds: float) -> None:
    """Moves what is known of a size towards `seconds`, faster if these are fewer: others disturb this machine."""
    before = times.get(size, seconds)
    times[size] = before + (seconds - before) * (0.3 if seconds < before else 0.1)
