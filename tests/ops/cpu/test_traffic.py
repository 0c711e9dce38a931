"""A short run of traffic.py under ThreadSanitizer; docs/reliability.md has the long one."""

from pathlib import Path

import pytest

from tests.ops.cpu.traffic import DONE, MODES, built, under_sanitizer

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_traffic_has_no_race(tmp_path: Path) -> None:
    done = under_sanitizer(built(), tmp_path / "tree", "--steps", "25")
    assert done.returncode == 0, done.stderr[-8000:]
    assert len(DONE.findall(done.stdout)) == len(MODES), done.stdout


def test_a_planted_race_is_found(tmp_path: Path) -> None:
    done = under_sanitizer(built(racy=True), tmp_path / "tree", "--steps", "3")
    assert done.returncode == 66
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
