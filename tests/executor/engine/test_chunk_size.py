"""Chunks of a long prompt beside running requests, against steps whose times follow from known costs."""

import random

import numpy as np
import pytest

from executor.engine.chunk_size import ChunkSize, first_prompt, next_prompt
from executor.engine.request import Request
from executor.engine.sequence import Sequence, new_sequence

LONG, PAGE, PAUSE_S = 2000, 16, 0.2
COSTS = {  # seconds of a step, a token, a pair of tokens
    "attention": (0.002, 1e-5, 1e-6),  # a token at the end of the long prompt takes 200 times what the first one takes
    "both": (0.0005, 1e-4, 6e-7),
    "linear": (0.02, 2.5e-4, 3e-8),
    "weights": (0.1, 1e-3, 3e-7),  # half of the pause is taken by what does not depend on the chunk
    "barely": (0.15, 2e-3, 1e-7),  # little more than a page fits
}


class Machine:
    def __init__(self, costs: tuple[float, float, float], noise: float):
        self.costs, self.noise, self.random, self.chunk_size = np.array(costs), noise, random.Random(2), ChunkSize()

    def step(self, tokens: int, context: int) -> float:
        """The seconds of a step with `tokens` prompt tokens, of which `chunk_size` learns."""
        amounts = np.array([1, tokens, tokens * (context + tokens / 2)])
        seconds = float(self.costs @ amounts) * (1 + self.noise * self.random.random())
        self.chunk_size.learn(amounts, seconds)
        return seconds

    def warm_up(self) -> None:
        tokens = 64
        while self.step(tokens, 0) < 0.3 and tokens < 512:
            tokens *= 2

    def prompt(self) -> list[float]:
        """The seconds of each step of a long prompt."""
        context, found = 0, []
        while context < LONG:
            chunk = min(max(PAGE, self.chunk_size.tokens(context, PAUSE_S) // PAGE * PAGE), LONG - context)
            found.append(self.step(chunk, context))
            context += chunk
        return found


@pytest.mark.parametrize("noise", [0.0, 0.6])
@pytest.mark.parametrize("kind", COSTS)
def test_no_step_of_a_long_prompt_takes_twice_the_pause(kind: str, noise: float) -> None:
    """The first one, right after the warm-up, as little as those after short prompts, after one that was computed at
    once while nobody waited, and after a step that the machine has delayed."""
    machine = Machine(COSTS[kind], noise)
    machine.warm_up()
    steps = [machine.prompt()]
    for _ in range(3):
        for _ in range(10):
            machine.step(machine.random.randint(1, 60), 0)
        steps.append(machine.prompt())
        machine.step(LONG, 0)
        steps.append(machine.prompt())
        machine.chunk_size.learn(np.array([1.0, 100, 5000]), 9.0)
        steps.append(machine.prompt())
    assert max(map(max, steps)) < 2 * PAUSE_S
    used = np.mean([np.mean(prompt[:-1]) for prompt in steps])
    assert used > 0.5 * PAUSE_S  # and the pause is made use of


def test_each_prompt_of_the_warm_up_has_twice_the_tokens_until_it_takes_long_or_many_pages() -> None:
    """The last two arguments of both are sizes in tokens: of a page, of the longest sequence."""
    assert [first_prompt(page, 1000) for page in (16, 64, 128)] == [64, 64, 128]
    assert [first_prompt(16, longest) for longest in (66, 65, 64, 2)] == [64, 64, 63, 1]
    assert [next_prompt(64, seconds, 16, 64, 1000) for seconds in (0.01, 0.29, 0.3, 5.0)] == [128, 128, 0, 0]
    assert [next_prompt(64, 0.1, 16, pages, 1000) for pages in (1000, 64, 63, 1)] == [128, 128, 0, 0]
    assert [next_prompt(64, 0.1, 16, 64, longest) for longest in (130, 129, 128, 65)] == [128, 128, 0, 0]
    assert next_prompt(7, 0.1, 16, 64, 1000) == 14


def known(step: float, token: float, pair: float) -> ChunkSize:
    chunk_size = ChunkSize()
    chunk_size.costs = np.array([step, token, pair])
    return chunk_size


def prompt_of(length: int, num_computed: int) -> Sequence:
    made = new_sequence(0, Request((1,) * length))
    made.num_computed = num_computed
    return made


def test_a_chunk_is_of_whole_pages_behind_what_the_first_prompt_has_cached() -> None:
    chunk_size = known(0.1, 0.01, 0.002)
    decoding = prompt_of(900, 900)
    decoding.ids.append(7)
    running = [decoding, prompt_of(9, 5), prompt_of(9, 0)]
    assert [chunk_size.chunk(running, page, 0.5, None) for page in (1, 4, 5, 16)] == [12, 12, 10, 16]
    assert [chunk_size.chunk(running, 4, 0.5, most) for most in (8, 12, 13, None)] == [8, 12, 12, 12]
    assert chunk_size.chunk([decoding], 1, 0.5, None) == chunk_size.chunk([], 1, 0.5, None) == 15
