"""The soak in its short form: three minutes of few requests, servers that start, lose a rank and end."""

from pathlib import Path

import pytest

from tests.serving.history import Checker, read_history
from tests.serving.soak import History, Soak

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.beside]
SECONDS, RATE = 180, 4  # about 35 seconds of CPU, of which half are the starts of processes


def test_soak(tmp_path: Path) -> None:
    Soak(History(tmp_path / "history"), tmp_path, SECONDS, RATE, seed=0, settings=[]).run()
    checker = Checker(read_history(tmp_path / "history"), times=False)
    print(checker.table())
    assert checker.violations == []
    assert checker.whole
