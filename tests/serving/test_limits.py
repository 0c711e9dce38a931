"""How long requests would wait is known from how fast prompts start, and not only from how fast they are computed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor.config.case import ServeSettings
from executor.serving.errors import ApiError
from executor.serving.limits import LONGEST_S, Limits, Ticket
from executor.serving.messages import Ready

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
