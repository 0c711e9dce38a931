"""The soak in its short form: no request is lost while clients and a rank are killed. Times are only printed."""

from pathlib import Path

import pytest

from tests.serving.soak import problems, report, soak

pytestmark = pytest.mark.slow


def test_soak(tmp_path: Path) -> None:
    found, text = soak(tmp_path, 12, clients=8, ranks=1, settings=[], seed=0)
    print(report(found))
    assert not problems(found, times=False), text[-2000:]
    assert min(found.ends["answered"], found.ends["killed"], found.ends["400 too long"], found.ends["400 broken"]) > 0
