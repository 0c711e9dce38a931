"""The report of a run about its shadow experts: its figures, its trace, and the line that it prints."""

from typing import Any

import numpy as np
import pytest

from umbra.cpu_offload.history import History, LongLayer, StepRecord, summary

REPORT: dict[str, Any] = {"hit_rate": 0.5, "shadow_ms": 1.9, "copies": 3, "evictions": 2, "evictions_for_cache": 1}
REPORT |= {"streamed": {"bytes": 0}}


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


def step(start: int, hits: list[int], misses: list[int], times: list[list[int]], kv: int, experts: int) -> StepRecord:
    packed = np.packbits(np.array([[True, False, True], [False, False, True]]), axis=1)
    return StepRecord(start, start + 9000, np.array(hits), np.array(misses), np.array(times), packed, 3, kv, experts, 1)


WAITED = step(1000, [3, 1], [1, 0], [[2000, 5000, 4000, 5500], [0, 0, 0, 0]], 4, 8)
HIDDEN = step(11000, [2, 2], [0, 2], [[0, 0, 0, 0], [12000, 16000, 16500, 17000]], 9, 6)


def history() -> History:
    return History(
        steps=[WAITED, HIDDEN],
        copies=[(3000, 4000, 1, 2), (12000, 15000, 1, 0), (13000, 14000, 0, 1)],
        evicted=[1, 0, 0],
        for_cache=2,
        frames=20,
        long=[LongLayer(5, 7, 0, 0, 100, 1.0), LongLayer(5, 7, 3, 1, 50, 1.0), LongLayer(6, 7, 3, 1, 0, 1.0)],
    )


def test_a_report_has_sums_of_all_steps_and_of_each_layer() -> None:
    assert WAITED.resident.tolist() == [[True, False, True], [False, False, True]]
    assert [layer.hit_rate for layer in history().long] == [0.0, 0.75, 0.75]
    report = history().report()
    layers: list[Any] = report.pop("layers")
    assert report == {
        "steps": 2,
        "hit_rate": 8 / 11,
        "exposed_ms": pytest.approx(0.002),
        "shadow_ms": pytest.approx(0.007),
        "copies": 3,
        "evictions": 3,
        "evictions_for_cache": 2,
        "arena_frames": 20,
        "most_kv_frames": 9,
        "kv_frames_gained": 2,
        "streamed": {"steps": 1, "layers": 2, "bytes": 150},
    }
    names = ("hit_rate", "exposed_ms", "shadow_ms", "copies", "evictions")
    assert [tuple(layer[name] for name in names) for layer in layers] == [
        (5 / 6, pytest.approx(0.0015), pytest.approx(0.003), 1, 2),
        (3 / 5, pytest.approx(0.0005), pytest.approx(0.004), 2, 1),
    ]
