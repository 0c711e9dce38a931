"""Chunks of a long prompt beside running requests, against steps whose times follow from known costs."""

import random

import numpy as np
import pytest

from umbra.executor.engine.schedule.prompt_costs import PromptCosts

LONG, PAGE, PAUSE_S = 2000, 16, 0.2
COSTS = {  # seconds of a step, a token, a pair of tokens
    "attention": (0.002, 1e-5, 1e-6),  # a token at the end of the long prompt takes 200 times what the first one takes
    "weights": (0.1, 1e-3, 3e-7),  # half of the pause is taken by what does not depend on the chunk
    "barely": (0.15, 2e-3, 1e-7),  # little more than a page fits
}


class Machine:
    def __init__(self, costs: tuple[float, float, float], noise: float):
        self.costs, self.noise, self.random, self.prompt_costs = np.array(costs), noise, random.Random(2), PromptCosts()

    def step(self, tokens: int, context: int) -> float:
        """The seconds of a step with `tokens` prompt tokens, of which `prompt_costs` learns."""
        amounts = np.array([1, tokens, tokens * (context + tokens / 2)])
        seconds = float(self.costs @ amounts) * (1 + self.noise * self.random.random())
        self.prompt_costs.learn(amounts, seconds)
        return seconds

    def warm_up(self) -> None:
        tokens = 64
        while self.step(tokens, 0) < 0.3 and tokens < 512:
            tokens *= 2

    def prompt(self) -> list[float]:
        """The seconds of each step of a long prompt."""
        context, seconds = 0, []
        while context < LONG:
            chunk = min(max(PAGE, self.prompt_costs.tokens(context, PAUSE_S) // PAGE * PAGE), LONG - context)
            seconds.append(self.step(chunk, context))
            context += chunk
        return seconds


@pytest.mark.parametrize("kind", COSTS)
def test_no_step_of_a_long_prompt_takes_twice_the_pause(kind: str) -> None:
    """The first one, right after the warm-up, as little as those after short prompts, after one that was computed at
    once while nobody waited, and after a step that the machine has delayed."""
    machine = Machine(COSTS[kind], 0.6)
    machine.warm_up()
    steps = [machine.prompt()]
    for _ in range(3):
        for _ in range(10):
            machine.step(machine.random.randint(1, 60), 0)
        steps.append(machine.prompt())
        machine.step(LONG, 0)
        steps.append(machine.prompt())
        machine.prompt_costs.learn(np.array([1.0, 100, 5000]), 9.0)
        steps.append(machine.prompt())
    assert max(map(max, steps)) < 2 * PAUSE_S
    used = np.mean([np.mean(prompt[:-1]) for prompt in steps])
    assert used > 0.5 * PAUSE_S  # and the pause is made use of
