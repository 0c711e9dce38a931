"""The rules of drafts, number by number: who gets some, what steps cost, and what is learned."""

from array import array
from typing import Any

import pytest
import torch

from executor.engine import sampling
from executor.engine.drafts import ASSUMED_ROW, FORGET_STEPS, MARGIN, Drafts
from executor.engine.matches import FIRST_HIT_RATE, LEARNING, LEAST_RATE, MATCH, PAUSE, Matches
from executor.engine.request import Request, SamplingParams
from executor.engine.sequence import Sequence, new_sequence


def sequence(ids: tuple[int, ...] = (1, 2, 3, 4, 1, 2, 3), rate: float = 0.9) -> Sequence:
    made = new_sequence(0, Request(ids, SamplingParams()))
    made.matches.rate = rate
    return made


def eager(most: int = 8) -> Drafts:
    """Drafts for which further rows cost nothing."""
    drafts = Drafts(most)
    drafts._seconds = {1: 1.0, 256: 1.0}
    return drafts


def test_who_gets_drafts() -> None:
    drafted = [sequence() for _ in range(4)]
    drafted[1].matches.pause = len(drafted[1].ids) + 1
    drafted[2].matches.pause = len(drafted[2].ids)  # its pause is over
    drafted[3].matcher = object()  # type: ignore[assignment]
    without = sequence()
    eager().propose([*drafted, without], [2, 2, 2, 2, 0])
    assert [s.drafted for s in drafted] == [2, 0, 1, 0]  # of sizes up to nine rows, eight is the largest
    assert (without.drafted, list(without.ids)) == (0, [1, 2, 3, 4, 1, 2, 3])
    assert list(drafted[0].ids) == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    one = sequence()
    eager(3).propose([one], [8])
    assert one.drafted == 3
    one = sequence()
    eager().propose([one], [1])
    assert one.drafted == 1


def test_rows_can_be_filled_to_a_size() -> None:
    drafts, made = Drafts(3), [sequence() for _ in range(3)]
    drafts.fill(8)
    drafts.propose(made, [1, 3, 0])
    assert [s.drafted for s in made] == [1, 3, 0]
    assert list(made[1].ids[-4:]) == [3, 3, 3, 3]
    drafts.fill(5)
    made = [sequence() for _ in range(3)]
    drafts.propose(made, [3, 3, 3])
    assert [s.drafted for s in made] == [1, 1, 0]
    assert drafts._rows == 0  # once
    drafts.fill(2)
    made = [sequence() for _ in range(3)]
    drafts.propose(made, [3, 3, 3])
    assert [s.drafted for s in made] == [0, 0, 0]


def test_the_cost_of_rows_is_measured_between_or_assumed() -> None:
    drafts = Drafts(8)
    assert drafts._cost(3) == 1.0
    drafts._seconds = {2: 1.0, 4: 2.0, 8: 3.0}
    assert [drafts._cost(rows) for rows in (2, 3, 4, 5, 8)] == [1.0, 1.5, 2.0, 2.25, 3.0]
    assert drafts._cost(1) == pytest.approx(1.0 * (1 + ASSUMED_ROW) / (1 + 2 * ASSUMED_ROW))
    assert drafts._cost(16) == pytest.approx(3.0 * (1 + 16 * ASSUMED_ROW) / (1 + 8 * ASSUMED_ROW))


def test_drafts_must_pay_clearly() -> None:
    """Of 1 token in 1 s, two in 2 / MARGIN s are no better."""
    drafts = Drafts(8)
    drafts._seconds = {1: 1.0, 2: 2 / MARGIN}
    assert drafts._worth(1, [1.0]) == 0
    drafts._seconds[2] -= 1e-6
    assert drafts._worth(1, [1.0]) == 1
    assert drafts._worth(1, []) == 0
    drafts._seconds = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 256: 1e6}
    assert drafts._worth(1, [0.9, 0.8, 0.5]) == 3
    assert drafts._worth(1, [0.9, 0.8, 0.1]) == 2
    assert drafts._worth(2, [0.5, 0.4]) == 2
    drafts._seconds = {5: 1.0, 6: 1.0, 8: 1.01}
    assert drafts._worth(5, [0.9]) == 1  # 6 is the next size
    assert drafts._worth(5, [0.9, 0.9]) == 1
    assert drafts._worth(5, [0.9, 0.9, 0.9]) == 3


def test_times_are_learned_with_more_weight_if_they_are_shorter() -> None:
    drafts = Drafts(8)
    drafts.took(2, 100.0)  # the first one captures a graph
    assert drafts._seconds == {}
    drafts.took(2, 10.0)
    assert drafts._seconds == {2: 10.0}
    drafts.took(2, 20.0)
    assert drafts._seconds[2] == pytest.approx(11.0)
    drafts.took(2, 1.0)
    assert drafts._seconds[2] == pytest.approx(8.0)
    assert drafts._measured == {2: 4}


def test_what_was_not_measured_for_long_is_forgotten() -> None:
    drafts = Drafts(8)
    drafts._captured = {1, 2, 3}
    drafts._seconds, drafts._measured = {1: 1.0, 2: 2.0}, {1: FORGET_STEPS - 1, 2: FORGET_STEPS}
    drafts._steps = 2 * FORGET_STEPS - 2
    drafts.took(3, 3.0)
    assert sorted(drafts._seconds) == [1, 2, 3]
    drafts.took(3, 3.0)
    assert sorted(drafts._seconds) == [3]
    drafts._seconds[2], drafts._measured[2] = 2.0, 2 * FORGET_STEPS + 1
    drafts._steps = 3 * FORGET_STEPS - 1
    drafts.took(3, 3.0)
    assert sorted(drafts._seconds) == [2, 3]


@pytest.mark.parametrize(
    ("chosen", "taken", "rates"),
    [([4, 1, 9], [4, 1, 9], 2), ([4, 7, 9], [4, 7], 1), ([5, 1, 9], [5], 0)],
)
def test_a_draft_counts_as_far_as_it_is_what_was_chosen(chosen: list[int], taken: list[int], rates: int) -> None:
    one = sequence(rate=0.5)
    one.ids.extend([4, 1])
    one.drafted, one.matches.expected = 2, (7, 4)
    assert list(Drafts(8).accept(one, chosen)) == taken
    assert list(one.ids) == [1, 2, 3, 4, 1, 2, 3]
    assert (one.drafted, one.matches.expected) == (0, None)
    wanted = Matches(rate=0.5)
    for _ in range(rates):
        wanted.learn(True)
    if rates < 2:
        wanted.learn(False)
    assert one.matches.rate == wanted.rate


def test_a_rate_moves_towards_what_came() -> None:
    matches = Matches()
    assert matches.rate == FIRST_HIT_RATE
    matches.learn(True)
    assert matches.rate == pytest.approx(FIRST_HIT_RATE + (1 - FIRST_HIT_RATE) * LEARNING)
    matches.rate = 0.5
    matches.learn(False)
    assert matches.rate == pytest.approx(0.5 * (1 - LEARNING))


def test_what_followed_the_last_tokens() -> None:
    ids = array("q", [1, 2, 3, 4, 1, 2, 3])
    matches = Matches()
    assert list(matches.look_up(ids, 2)) == [4, 1]
    assert matches.expected == (7, 4)
    assert matches.pause == 0
    assert matches.end == len(ids) - 1
    assert matches.ends == {tuple(ids[end - MATCH : end]): end for end in range(MATCH, len(ids))}
    ids.append(4)
    assert list(matches.look_up(ids, 6)) == [1, 2, 3, 4, 1, 2]  # it goes on as if the text repeated itself
    assert matches.rate == pytest.approx(FIRST_HIT_RATE + (1 - FIRST_HIT_RATE) * LEARNING)  # 4 was right
    ids.append(9)
    assert list(matches.look_up(ids, 2)) == []
    assert matches.pause == len(ids) + PAUSE
    assert matches.expected is None
    for rate, pause in ((LEAST_RATE, 0), (LEAST_RATE - 1e-9, 7 + PAUSE)):
        matches = Matches(rate=rate)
        assert list(matches.look_up(array("q", [1, 2, 3, 4, 1, 2, 3]), 1)) == [4]
        assert matches.pause == pause
    assert list(Matches().look_up(array("q", [1, 2]), 3)) == []


def test_rows_of_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(5, 7), torch.tensor([3, -1, 6, 0, 2])
    whole = sampling.logprobs_of(logits, tokens, 2)
    assert whole.shape == (5, 5)
    expected = logits.log_softmax(-1)
    assert torch.allclose(whole[:, 0], expected.gather(1, tokens.clamp(min=0)[:, None])[:, 0])
    values, ids = expected.topk(2)
    assert torch.equal(whole[:, 1:3], ids.float())
    assert torch.allclose(whole[:, 3:], values)
    monkeypatch.setattr(sampling, "LOGPROB_ROWS", 2)
    assert torch.equal(sampling.logprobs_of(logits, tokens, 2), whole)
    assert sampling.logprobs_of(logits[:0], tokens[:0], 2).shape == (0, 5)
    assert sampling.logprobs_of(logits, tokens, 9).shape == (5, 15)  # a vocabulary of seven
    row: list[Any] = whole[0].tolist()
    found = sampling.token_logprob(row, 1)
    assert found.logprob == row[0]
    assert found.top == ((int(row[1]), row[3]),)
    assert len(sampling.token_logprob(row, 2).top) == len(sampling.token_logprob(row, 3).top) == 2
    assert sampling.token_logprob(row, 0).top == ()
