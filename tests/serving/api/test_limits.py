"""The forecast of a request's wait follows the rate at which prompts start, not only the rate at which they are
computed."""

from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.clock import Clock
from umbra.executor.config.case import ServeSettings
from umbra.serving.api.errors import ApiError
from umbra.serving.api.limits import LONGEST_S, Admission, Ticket
from umbra.serving.ranks.messages import Ready

READY = Ready(416, 4, 96, 16, 50, 1, [0], 100.0)
FAST = 1e6  # prompt tokens that are computed in a second
PROMPT = 100


def limits(clock: Clock, **settings: Any) -> Admission:
    return Admission(replace(ServeSettings(), **settings), clock)


def refused(of: Admission, tokens: int = PROMPT, sequences: int = 1, rate: float = FAST) -> ApiError:
    with pytest.raises(ApiError) as raised:
        of.admit(tokens, sequences, READY, rate)
    assert raised.value.status == 429
    return raised.value


def busy(clock: Clock, **settings: Any) -> tuple[Admission, list[Ticket]]:
    """Rows decode for so long that a prompt starts every half second; ten wait. -> the open tickets"""
    queue = limits(clock, **settings)
    tickets = [queue.admit(PROMPT, 1, READY, FAST) for _ in range(14)]
    for ticket in tickets[:4]:
        ticket.started(PROMPT)
    for _ in range(20):
        clock.now += 0.5
        tickets.pop(0).__exit__()
        tickets[3].started(PROMPT)
        tickets.append(queue.admit(PROMPT, 1, READY, FAST))
    return queue, tickets


def test_a_wait_for_rows_is_seen_and_forgotten() -> None:
    clock = Clock()
    of, tickets = busy(clock, target_ttft_s=4.5)
    assert of.waiting_tokens == 10 * PROMPT
    of.admit(PROMPT, 1, READY, FAST)  # 24 prompts have started in ten seconds, so it waits for 4.2
    error = refused(of)
    assert error.code == "too_slow"
    assert "1100 tokens wait, which take about 5 s; try again in 1 s" in str(error)
    for ticket in tickets[4:]:  # whoever leaves before its first token has not started
        ticket.__exit__()
    assert of.measured(FAST) == 240
    assert of.measured(30.0) == 30.0  # computing is what takes the time
    clock.now += LONGEST_S + 1
    assert of.measured(FAST) == FAST


def test_as_many_sequences_are_open_as_rows_and_queue_have_room() -> None:
    """Without a setting, the queue has room for four batches; a request needs no more places than rows."""
    for queue, most in ((3, 7), (0, 20)):
        of = limits(Clock(), max_queue=queue)
        tickets = [of.admit(10, 1, READY, FAST) for _ in range(most)]
        assert (of.open, of.waiting_tokens) == (most, 10 * most)
        error = refused(of)
        assert (error.code, error.retry_s) == ("queue_full", 1)
        assert str(error) == f"the server is busy: {most} requests run or wait, which is the most; try again in 1 s"
        assert of.refused == {"queue_full": 1, "too_slow": 0, "timeout": 0}
        tickets.pop().__exit__()
        refused(of, sequences=2)
        assert of.admit(5, 1, READY, FAST).rows == 1
    assert limits(Clock(), max_queue=4).admit(10, 99, READY, FAST).rows == 4


@pytest.mark.parametrize(("tokens", "retry"), [(101, 1), (120, 2), (121, 3), (9000, 60)])
def test_when_to_come_back(tokens: int, retry: int) -> None:
    """As soon as prompts would be short enough, in whole seconds, at least one and at most a minute."""
    of = limits(Clock(), target_ttft_s=10.0)
    of.admit(100, 1, READY, 10.0)
    of.admit(tokens - 100, 1, READY, 10.0)  # the first one waits just as long as is allowed
    error = refused(of, rate=10.0)
    assert (error.code, error.retry_s, of.refused["too_slow"]) == ("too_slow", retry, 1)
    assert f"{tokens} tokens wait, which take about {tokens / 10:.0f} s" in str(error)
    unknown = limits(Clock(), target_ttft_s=0.5)  # before anything was measured, nobody is refused for its speed
    unknown.admit(10_000, 1, READY, 0.0)
    unknown.admit(10_000, 1, READY, 0.0)
