"""The costs of prompt tokens in a step, learned from the times of earlier steps: they say how many fit into a step in
which other requests decode.

A step of n tokens after c computed ones takes, in seconds,

    step + token * n + pair * n * (c + n / 2)

The first part is what does not depend on n, such as reading the weights and the rows that decode; the second is the
linear layers, the third attention, with which the end of a long prompt takes longer than its beginning.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from umbra.executor.engine.schedule.sequence import Sequence

FIRST = np.array([0.3, 0.5, 0.2])  # the parts that a short step's time is divided into before more is known
LEARN = 0.5  # the share of an error that is corrected at once
DELAYED = 2.0  # a step counts for at most this many times what was expected of it: something else has delayed it
LEAST = 1e-12  # seconds of each part, so that each can grow again
WARM_UP_TOKENS = 64  # of the first prompt of the warm-up; each next one has twice as many
WARM_UP_S = 0.3  # no more prompts follow one that takes longer
WARM_UP_PART = 8  # nor one that would take this part of all pages: experts would leave


def first_prompt(page: int, longest: int) -> int:
    """Tokens of the first prompt of the warm-up; `longest` are those of the longest sequence."""
    return min(max(WARM_UP_TOKENS, page), longest - 1)


def next_prompt(length: int, seconds: float, page: int, pages: int, longest: int) -> int:
    """Tokens of the prompt after one of `length` that took `seconds`, with `pages` pages in all; 0: it was the last."""
    most = min(longest - 1, page * pages // WARM_UP_PART)
    return 2 * length if seconds < WARM_UP_S and 2 * length <= most else 0


class PromptCosts:
    def __init__(self) -> None:
        self.costs = np.zeros(3)  # seconds of a step, a token, a pair; zeros: no step was seen

    def learn(self, amounts: NDArray[np.float64], seconds: float) -> None:
        """Corrects the costs by what a step took: each the more, the larger its part of the predicted time is."""
        if not self.costs.any():
            self.costs = FIRST * seconds / amounts
        parts = self.costs * amounts
        error = min(seconds, DELAYED * parts.sum()) - parts.sum()
        self.costs = np.maximum(self.costs * (1 + LEARN * error * parts / (parts @ parts)), LEAST)

    def tokens(self, context: int, seconds: float) -> int:
        """Returns the number of tokens after `context` computed ones that take `seconds`."""
        step, token, pair = self.costs.tolist()
        token += pair * context
        left = max(seconds - step, 0.0)
        # The larger root of pair / 2 n^2 + token n - left = 0, without the difference of two large numbers.
        return int(2 * left / (token + math.sqrt(token**2 + 2 * pair * left)))

    def mixed_tokens(self, running: Iterable[Sequence], page: int, seconds: float, prefill_tokens: int | None) -> int:
        """Most prompt tokens of a step in which some of the `running` sequences decode: as many as take `seconds`, in
        whole pages of `page` tokens, at least one of them; `prefill_tokens` are the most of any step."""
        context = next((s.num_computed for s in running if not s.decoding), 0)
        wanted = max(page, self.tokens(context, seconds) // page * page)
        return min(wanted, prefill_tokens) if prefill_tokens else wanted


def amounts_of(sequences: Iterable[Sequence]) -> NDArray[np.float64]:
    """Returns (steps, tokens, pairs of a token and one before it) of the prompts in a step that is about to run."""
    return amounts((s.new_tokens, s.num_computed) for s in sequences if not s.decoding)


def amounts(prompts: Iterable[tuple[int, int]]) -> NDArray[np.float64]:
    """`amounts_of` for `prompts`, each as (tokens in the step, tokens computed before it)."""
    tokens, pairs = 0, 0.0
    for new, computed in prompts:
        tokens += new
        pairs += new * (computed + new / 2)
    return np.array([1.0, tokens, pairs])
