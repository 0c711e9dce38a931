"""Which steps are traced, and where their traces are written."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.engine.profiler import Profiler


class Profile:
    def __init__(self, written: list[Any], record_shapes: bool):
        self.written = written
        assert record_shapes

    def __enter__(self) -> Any:
        self.written.append("in")
        return self

    def __exit__(self, *given: object) -> None:
        self.written.append("out")

    def export_chrome_trace(self, path: str) -> None:
        self.written.append(Path(path).relative_to("folder").as_posix())


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    fake = SimpleNamespace(profile=lambda record_shapes: Profile(found, record_shapes))
    monkeypatch.setattr(torch, "profiler", fake)
    return found


def test_the_first_four_steps_of_each_phase_are_traced(written: list[Any]) -> None:
    profiler = Profiler(True, Path("folder"), 2)
    for _ in range(6):
        with profiler.step("decode"):
            written.append("step")
    traced = [["in", "step", "out", f"trace_decode{number}_rank2.json"] for number in range(4)]
    assert written == [*(one for each in traced for one in each), "step", "step"]
    del written[:]
    with profiler.step("prefill"):
        written.append("step")
    assert written == ["in", "step", "out", "trace_prefill0_rank2.json"]
    assert profiler.seen == {"decode": 4, "prefill": 1}


def test_nothing_is_traced_unless_it_is_enabled(written: list[Any]) -> None:
    profiler, done = Profiler(False, Path("folder"), 0), list[int]()
    with profiler.step("decode"):
        done.append(1)
    assert (done, written, profiler.seen) == ([1], [], {})
