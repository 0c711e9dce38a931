"""Guesses of a loop's drafter, compared with an oracle's."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.fakes.drafts import FreeDrafts
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.step.loop import Loop
from umbra.models.batch import Batch

PROMPTS = [[5, 17, 3, 88, 21, 9, 40, 9, 40, 9], list(range(30, 53))]


def finish(loop: Loop) -> None:
    while not loop.idle:
        loop.step()


def compare_guesses(
    loop: Loop, oracle: Callable[[list[int], int], list[tuple[Tensor, int]]], logits_of: Callable[[Tensor], Tensor]
) -> None:
    """Compares guesses of a loop that makes up to 3 with those of `oracle(ids, depth)` of what follows `ids`, (logits,
    token) of each: after prompts, also in chunks, and while drafts are accepted and refused. `logits_of` gives the
    logits of a hidden state that guesses leave."""
    loop.scheduler.drafts = FreeDrafts(3)
    drafter, model, seen = loop.speculation.drafter, loop.engine.model, list[Tensor]()
    assert drafter

    def run(batch: Batch) -> tuple[Tensor, Tensor]:
        ids, hidden = model.guess(batch)
        seen.append(logits_of(hidden))
        return ids, hidden

    drafter.run = run
    # Twice the same answer: the second time with the right guesses in place of half of those that are made.
    first = [loop.submit(Request(tuple(prompt), SamplingParams(max_tokens=12))) for prompt in PROMPTS]
    finish(loop)
    right = {tuple(s.ids[: s.prompt_len]): s.ids.tolist() for s in first}
    again = [loop.submit(Request(tuple(prompt), SamplingParams(max_tokens=12))) for prompt in PROMPTS]
    steps = checked = 0
    while not loop.idle:
        seen.clear()
        rows = [event.id - len(first) for event in loop.step()]
        steps += 1
        for row, s in enumerate(again[i] for i in rows):
            expected = oracle(s.ids.tolist(), len(s.guesses)) if s.guesses else []
            assert list(s.guesses) == [token for _, token in expected]
            for (logits, _), own in zip(expected, seen, strict=False):
                torch.testing.assert_close(own[row], logits, atol=1e-4, rtol=1e-4)
            checked += len(s.guesses)
            if steps % 2:
                known = right[tuple(s.ids[: s.prompt_len])]
                s.guesses[:2] = type(s.guesses)("q", known[len(s.ids) : len(s.ids) + 2])[: len(s.guesses)]
    assert [s.ids for s in again] == [s.ids for s in first]
    assert checked > 20
    assert 5 < loop.timings.accepted_tokens < loop.timings.drafted_tokens
