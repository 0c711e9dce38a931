"""The choice of tokens, compared with numbers worked out by hand: random numbers, draws, filters, penalties and
grammars."""

import math
from array import array
from typing import Any

import pytest
import torch

from umbra.executor.engine.schedule.request import Grammar, SamplingParams
from umbra.ops.sampling import Choice, adjust, draw, filtered_probabilities

V = 5


def choice(ids: tuple[int, ...] = (), prompt: int = 0, seed: int = 0, **settings: Any) -> Choice:
    allowed = settings.pop("allowed", None)
    return Choice(SamplingParams(**settings), seed, array("q", ids), prompt, len(ids), allowed)


def test_a_draw_is_the_first_token_whose_sum_exceeds_the_number() -> None:
    row = [0.0, 0.25, 0.0, 0.5, 0.25]
    draws = [0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999999]
    assert draw(torch.tensor([row] * 6), draws).tolist() == [1, 1, 3, 3, 4, 4]
    nearly = torch.tensor([[0.5, 0.5, 0.0]])
    assert draw(nearly, [1.0]).tolist() == [1]  # no token of probability 0 behind the total
    assert draw(2 * torch.tensor([row]), [0.5]).tolist() == [3]  # sums count as shares of their total


def probabilities(*rows: dict[str, Any]) -> list[list[float]]:
    """Returns the probabilities of tokens that have 0.4, 0.3, 0.15, 0.1 and 0.05 at temperature 1."""
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log().repeat(len(rows), 1)
    settings = [SamplingParams(**({"temperature": 1.0} | row)) for row in rows]
    return [[round(p, 4) for p in row] for row in filtered_probabilities(logits, settings).tolist()]


def shares(*weights: float) -> list[float]:
    return [round(weight / sum(weights), 4) for weight in weights]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, shares(0.4, 0.3, 0.15, 0.1, 0.05)),
        ({"temperature": 0.5}, shares(0.16, 0.09, 0.0225, 0.01, 0.0025)),
        ({"top_k": 1}, shares(1, 0, 0, 0, 0)),
        ({"top_k": 2}, shares(0.4, 0.3, 0, 0, 0)),
        ({"top_k": 4}, shares(0.4, 0.3, 0.15, 0.1, 0)),
        ({"top_k": 5}, shares(0.4, 0.3, 0.15, 0.1, 0.05)),
        ({"top_k": 99}, shares(0.4, 0.3, 0.15, 0.1, 0.05)),
        ({"top_p": 0.0}, shares(1, 0, 0, 0, 0)),
        ({"top_p": 0.39}, shares(1, 0, 0, 0, 0)),
        ({"top_p": 0.41}, shares(0.4, 0.3, 0, 0, 0)),
        ({"top_p": 0.86}, shares(0.4, 0.3, 0.15, 0.1, 0)),
        ({"top_p": 0.96}, shares(0.4, 0.3, 0.15, 0.1, 0.05)),
        ({"top_k": 2, "top_p": 0.56}, shares(1, 0, 0, 0, 0)),  # of the two that are left the first has 0.571
        ({"top_k": 2, "top_p": 0.58}, shares(0.4, 0.3, 0, 0, 0)),
        ({"min_p": 0.24}, shares(0.4, 0.3, 0.15, 0.1, 0)),
        ({"min_p": 0.26}, shares(0.4, 0.3, 0.15, 0, 0)),
        ({"min_p": 1.0}, shares(1, 0, 0, 0, 0)),
    ],
)
def test_filters_leave_the_most_probable_tokens(settings: dict[str, Any], wanted: list[float]) -> None:
    [chances] = probabilities(settings)
    assert chances == pytest.approx(wanted, abs=2e-4)


def test_each_row_has_filters_of_its_own() -> None:
    settings: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_k": 3}, {"top_p": 0.41}, {"min_p": 0.26}]
    settings += [{"temperature": 0.5}]
    for chances, one in zip(probabilities(*settings), settings, strict=True):
        assert chances == pytest.approx(probabilities(one)[0], abs=2e-4)


def test_without_top_p_no_token_is_dropped_beside_a_row_that_has_it() -> None:
    """Nor those that are too improbable to change a sum."""
    logits = torch.tensor([[0.0, -30.0, -31.0]] * 2)
    kept = filtered_probabilities(logits, [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)])
    assert (kept > 0).tolist() == [[True] * 3, [True, False, False]]


def test_equal_tokens_are_dropped_from_the_last_and_all_kept_at_the_border() -> None:
    logits = torch.zeros(2, 4)
    both = filtered_probabilities(logits, [SamplingParams(temperature=1.0, top_p=0.5), SamplingParams(temperature=1.0)])
    assert both.tolist() == [[0.5, 0.5, 0.0, 0.0], [0.25] * 4]
    kept = filtered_probabilities(logits[:1], [SamplingParams(temperature=1.0, top_k=2)])
    assert kept.tolist() == [[0.25] * 4]
    kept = filtered_probabilities(logits[:1], [SamplingParams(temperature=1.0, min_p=1.0)])
    assert kept.tolist() == [[0.25] * 4]


def adjusted(logits: list[float], ids: tuple[int, ...] = (), prompt: int = 0, **settings: Any) -> list[float]:
    row = torch.tensor(logits)
    adjust(row, choice(ids, prompt, **settings))
    return row.tolist()


def test_penalties_and_biases_change_the_logits_of_their_tokens() -> None:
    plain = [4.0, -4.0, 0.0, 2.0, 1.0]
    assert adjusted(plain, (0, 1), 1) == plain
    assert adjusted(plain, logit_bias={1: 2.5, 3: -1.0}) == [4.0, -1.5, 0.0, 1.0, 1.0]
    assert adjusted(plain, (0, 1, 2), 3, repetition_penalty=2.0) == [2.0, -8.0, 0.0, 2.0, 1.0]
    assert adjusted(plain, (0, 0, 1), 1, presence_penalty=0.5) == [3.5, -4.5, 0.0, 2.0, 1.0]
    assert adjusted(plain, (0, 0, 1), 2, presence_penalty=0.5) == [4.0, -4.5, 0.0, 2.0, 1.0]
    assert adjusted(plain, (0, 0, 1), 0, frequency_penalty=0.5) == [3.0, -4.5, 0.0, 2.0, 1.0]
    assert adjusted(plain, (0, 0, 1), 0, frequency_penalty=0.5, presence_penalty=1.0) == [2.0, -5.5, 0.0, 2.0, 1.0]
    assert adjusted(plain, (0,), 1, presence_penalty=1.0) == plain  # the prompt's tokens were not generated
    # the bias comes first, and what was generated last
    assert adjusted(plain, (1,), 0, logit_bias={1: 6.0}, repetition_penalty=2.0, presence_penalty=0.25)[1] == 0.75


def test_tokens_behind_the_position_do_not_matter() -> None:
    """Tokens behind the position are drafts, which the row of this token does not know."""
    ids = array("q", [0, 1, 2])
    row = torch.ones(V)
    adjust(row, Choice(SamplingParams(presence_penalty=1.0), 0, ids, 0, 2))
    assert row.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    row = torch.ones(V)
    adjust(row, Choice(SamplingParams(repetition_penalty=2.0), 0, ids, 0, 1))
    assert row.tolist() == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_a_grammar_allows_tokens_from_the_lowest_bit_on() -> None:
    infinite = -math.inf
    assert adjusted([1.0] * 5, allowed=bytes([0b10110])) == [infinite, 1.0, 1.0, infinite, 1.0]
    assert adjusted([1.0] * 10, allowed=bytes([0b1])) == [1.0] + [infinite] * 9  # none behind the bits
    assert adjusted([1.0] * 2, allowed=bytes([0b1111_1101])) == [1.0, infinite]
    assert adjusted([1.0] * 2, allowed=b"") == [infinite] * 2


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        ({}, True),
        ({"temperature": 0.1}, False),
        ({"top_k": 3}, True),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": {1: 0.0}}, False),
        ({"grammar": Grammar("regex", "a")}, False),
        ({"presence_penalty": 1.0, "frequency_penalty": 1.0}, False),
    ],
)
def test_when_a_request_takes_the_largest_logit(settings: dict[str, Any], largest: bool) -> None:
    assert SamplingParams(**settings).takes_the_largest is largest
