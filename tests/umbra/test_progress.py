"""Progress: lines where nobody has a terminal, and messages to who shows them."""

import pytest

from umbra.base import progress


def test_lines_say_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with progress.progress("loading weights", 8, "B") as task:
        task.reach(2)
        task.reach(8)
    with progress.progress("silent", 1, "B", shown=False) as task:
        task.reach(1)
    assert capfd.readouterr().err == "loading weights: 25%\nloading weights: 100%\n"


def test_a_listener_is_told_instead(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[str, float]] = []
    monkeypatch.setattr(progress, "listeners", [lambda what, share: told.append((what, share))])
    monkeypatch.setattr(progress, "TOLD_S", 0.0)
    with progress.progress("loading weights", 4, "B") as task:
        task.reach(1)
    assert told == [("loading weights", 0.25)]
    assert not capfd.readouterr().err
