"""The line that a run prints about its shadow experts."""

import pytest

from cpu_offload.history import summary

REPORT = {
    "hit_rate": 0.5,
    "shadow_ms": 1.9,
    "copies": 3,
    "evictions": 2,
    "evictions_for_cache": 1,
    "streamed": {"bytes": 0},
}


@pytest.mark.parametrize(
    ("exposed", "said"),
    [
        (None, "1.9 ms on the CPU, 3 copies, 2 evictions (1 for the cache)"),
        (1.5, "1.9 ms on the CPU, of which 1.5 exposed, 3 copies"),
        (6.7, "6.7 ms exposed (waiting includes waking the threads and other work on their cores), 3 copies"),
    ],
)
def test_more_exposed_than_computed_is_explained(exposed: float | None, said: str) -> None:
    assert said in summary({**REPORT, "exposed_ms": exposed})
