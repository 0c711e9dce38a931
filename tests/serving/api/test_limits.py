"""How long requests would wait is known from how fast prompts start, and not only from how fast they are computed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor.config.case import ServeSettings
from serving.api.errors import ApiError
from serving.api.limits import LONGEST_S, Limits, Ticket
from serving.ranks.messages import Ready

READY = cast(Ready, SimpleNamespace(batch_size=4))
FAST = 1e6  # prompt tokens that are computed in a second
PROMPT = 100


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def busy(clock: Clock, each_s: float, **settings: Any) -> tuple[Limits, list[Ticket]]:
    """Rows decode for so long that a prompt starts every `each_s` seconds; ten wait. -> the open tickets"""
    limits = Limits(replace(ServeSettings(), **settings), clock)
    tickets = [limits.admit(PROMPT, 1, READY, FAST) for _ in range(14)]
    for ticket in tickets[:4]:
        ticket.started(PROMPT)
    for _ in range(20):
        clock.now += each_s
        tickets.pop(0).__exit__()
        tickets[3].started(PROMPT)
        tickets.append(limits.admit(PROMPT, 1, READY, FAST))
    return limits, tickets


def test_a_wait_for_rows_is_seen() -> None:
    clock = Clock()
    limits, tickets = busy(clock, 0.5, target_ttft_s=4.5)
    assert limits.waiting_tokens == 10 * PROMPT
    limits.admit(PROMPT, 1, READY, FAST)  # 24 prompts have started in ten seconds, so it waits for 4.2
    with pytest.raises(ApiError, match="1100 tokens wait, which take about 5 s; try again in 1 s") as raised:
        limits.admit(PROMPT, 1, READY, FAST)
    assert (raised.value.status, raised.value.code) == (429, "too_slow")
    for ticket in tickets[4:]:  # whoever leaves before its first token has not started
        ticket.__exit__()
    assert limits.measured(FAST) == 240


def test_a_burst_is_not_judged_by_calm_times() -> None:
    """Prompts that start as they come say nothing of how fast they could."""
    clock = Clock()
    limits = Limits(replace(ServeSettings(), target_ttft_s=1.0), clock)
    for _ in range(50):
        clock.now += 1.0
        ticket = limits.admit(PROMPT, 1, READY, FAST)
        ticket.started(PROMPT)
        ticket.__exit__()
    for _ in range(20):
        limits.admit(PROMPT, 1, READY, FAST)
    assert limits.measured(FAST) == FAST


def test_what_is_long_ago_is_forgotten() -> None:
    clock = Clock()
    limits, _ = busy(clock, 0.5)
    assert limits.measured(FAST) < FAST
    clock.now += LONGEST_S + 1
    assert limits.measured(FAST) == FAST


def limits(clock: Clock, **settings: Any) -> Limits:
    return Limits(replace(ServeSettings(), **settings), clock)


def refused(of: Limits, tokens: int = PROMPT, sequences: int = 1, rate: float = FAST) -> ApiError:
    with pytest.raises(ApiError) as raised:
        of.admit(tokens, sequences, READY, rate)
    assert raised.value.status == 429
    return raised.value


def test_as_many_sequences_are_open_as_rows_and_queue_have_room() -> None:
    """Without a setting, the queue has room for four batches; a request needs no more places than rows."""
    for settings, most in (({"max_queue": 3}, 7), ({"max_queue": 0}, 20)):
        of = limits(Clock(), **settings)
        assert (of.open, of.waiting_tokens, of.refused) == (0, 0, {"queue_full": 0, "too_slow": 0, "timeout": 0})
        tickets = [of.admit(10, 1, READY, FAST) for _ in range(most)]
        assert (of.open, of.waiting_tokens) == (most, 10 * most)
        error = refused(of)
        assert (error.code, error.retry_s) == ("queue_full", 1)
        assert str(error) == f"the server is busy: {most} requests run or wait, which is the most; try again in 1 s"
        assert of.refused == {"queue_full": 1, "too_slow": 0, "timeout": 0}
        refused(of)
        assert of.refused["queue_full"] == 2
        tickets.pop().__exit__()
        assert (of.open, of.waiting_tokens) == (most - 1, 10 * (most - 1))
        refused(of, sequences=2)
        assert of.admit(5, 1, READY, FAST).places == 1
    wide = limits(Clock(), max_queue=4)
    ticket = wide.admit(10, 99, READY, FAST)
    assert (ticket.places, wide.open) == (4, 4)
    assert wide.admit(10, 4, READY, FAST).places == 4
    refused(wide)


def test_a_ticket_is_given_back_once_and_whole() -> None:
    of = limits(Clock())
    with of.admit(30, 2, READY, FAST) as ticket:
        assert isinstance(ticket, Ticket)
        assert (of.open, of.waiting_tokens, ticket.waiting_tokens) == (2, 30, 30)
        ticket.started(10)
        assert (of.waiting_tokens, ticket.waiting_tokens) == (20, 20)
        ticket.started(50)  # no more than it has
        assert (of.waiting_tokens, ticket.waiting_tokens) == (0, 0)
        other = of.admit(7, 1, READY, FAST)
    assert (of.open, of.waiting_tokens, ticket.places, ticket.waiting_tokens) == (1, 7, 0, 0)
    ticket.__exit__()
    assert (of.open, of.waiting_tokens) == (1, 7)
    other.__exit__()
    assert (of.open, of.waiting_tokens) == (0, 0)


def test_when_to_come_back() -> None:
    """As soon as prompts would be short enough, in whole seconds, at least one and at most a minute."""
    for tokens, rate, text, retry in (
        (101, 10.0, "101 tokens wait, which take about 10 s", 1),
        (120, 10.0, "120 tokens wait, which take about 12 s", 2),
        (121, 10.0, "121 tokens wait, which take about 12 s", 3), (9000, 10.0, "9000 tokens wait, which take", 60),
    ):  # fmt: skip
        of = limits(Clock(), target_ttft_s=10.0)
        of.admit(tokens, 1, READY, rate)
        error = refused(of, rate=rate)
        assert (error.code, error.retry_s, of.refused["too_slow"]) == ("too_slow", retry, 1)
        assert text in str(error)
        assert (of.open, of.waiting_tokens) == (1, tokens)
    of = limits(Clock(), target_ttft_s=10.0)
    of.admit(100, 1, READY, 10.0)
    of.admit(1, 1, READY, 10.0)  # just as long as is allowed
    full = limits(Clock(), max_queue=1, target_ttft_s=1000.0)
    for _ in range(5):
        full.admit(50, 1, READY, 10.0)
    assert refused(full, rate=10.0).retry_s == 25
    unknown = limits(Clock(), target_ttft_s=0.5)  # before anything was measured, nobody is refused for its speed
    for _ in range(8):
        unknown.admit(1000, 1, READY, 0.0)
    assert unknown.open == 8


def test_starts_are_measured_while_more_are_open_than_rows() -> None:
    clock = Clock()
    of = limits(clock, target_ttft_s=1e9)
    tickets = [of.admit(PROMPT, 1, READY, FAST) for _ in range(4)]
    clock.now += 5
    tickets[0].started(PROMPT)  # all have a row: this says nothing
    clock.now += 5
    tickets.append(of.admit(PROMPT, 1, READY, FAST))  # now one has none
    full = clock.now
    tickets[1].started(PROMPT)
    clock.now = full + 0.5
    assert of.measured(FAST) == FAST  # watched for too short
    clock.now = full + 1.0
    assert of.measured(FAST) == PROMPT
    clock.now = full + 2.0
    tickets[2].started(40)
    assert of.measured(FAST) == 70
    assert of.measured(30.0) == 30.0  # computing is what takes the time
    clock.now = full + 10.0
    assert of.measured(FAST) == 14
    clock.now = full + 10.5  # the first one is more than ten seconds ago
    assert of.measured(FAST) == 4
    clock.now = full + 11.0
    tickets.append(of.admit(PROMPT, 1, READY, FAST))  # rows were full before: it goes on being watched
    assert of.measured(FAST) == 4
    tickets.pop().__exit__()
    tickets.pop().__exit__()
    assert of.measured(FAST) == FAST
    clock.now += 0.25
    tickets.append(of.admit(PROMPT, 1, READY, FAST))  # full again: what was before is forgotten
    clock.now += 1.0
    assert of.measured(FAST) == FAST
    tickets[3].started(PROMPT)
    assert of.measured(FAST) == PROMPT


def test_a_rate_needs_a_start() -> None:
    clock = Clock()
    of = limits(clock)
    for _ in range(6):
        of.admit(PROMPT, 1, READY, FAST)
    clock.now += 5.0
    assert of.measured(7.0) == 7.0
