"""What each kind of step adds to the timings."""

import pytest

from executor.engine.timings import Timings


def test_a_step_counts_as_what_it_computed() -> None:
    timings = Timings()
    timings.add(prompt_tokens=7, decoding=0, decode_tokens=0, drafted=0, seconds=0.5)
    assert (timings.prefill_tokens, timings.prefill_seconds) == (7, 0.5)
    assert (timings.decode_tokens, timings.decode_seconds, timings.per_token) == (0, 0, [])
    timings.add(prompt_tokens=3, decoding=2, decode_tokens=2, drafted=0, seconds=0.25)  # both in one step
    assert (timings.prefill_tokens, timings.prefill_seconds) == (10, 0.75)
    assert (timings.decode_tokens, timings.decode_seconds, timings.pure_decode_steps) == (2, 0.25, [])
    timings.add(prompt_tokens=0, decoding=2, decode_tokens=5, drafted=6, seconds=1.0)  # 3 of 6 drafts accepted
    assert (timings.prefill_tokens, timings.prefill_seconds) == (10, 0.75)
    assert (timings.decode_tokens, timings.decode_seconds, timings.pure_decode_steps) == (7, 1.25, [1.0])
    assert timings.per_token == pytest.approx([0.25, 0.4])
    assert (timings.drafted_tokens, timings.accepted_tokens) == (6, 3)
