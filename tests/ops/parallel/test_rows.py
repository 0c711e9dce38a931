"""Shares of a step's rows give the values of whole rows, over two, three and four ranks (gloo)."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("world_size", "comparisons"), [(2, 72), pytest.param(3, 72, marks=pytest.mark.thorough), (4, 108)]
)
def test_shares_equal_whole_rows(tmp_path: Path, world_size: int, comparisons: int) -> None:
    done = run_ranks(tmp_path, world_size, ["tests/ops/parallel/rows_ranks.py"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{comparisons} comparisons, 4 mistakes" in done.stdout
