"""The bounds of files that people write, to the value."""

from pathlib import Path

import pytest

from executor.checkpoint.formats import patterns
from executor.checkpoint.formats.patterns import LONGEST, MOST_ALTERNATIVES, MOST_REPEATS, pattern
from executor.config import load
from executor.config.load import read_yaml
from umbra.errors import UserError


def test_a_file_may_have_so_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MOST_VALUES", 5)
    (tmp_path / "a.yaml").write_text("a: 1\nb: 2\n")  # the mapping, two keys and their values
    assert read_yaml(tmp_path / "a.yaml", "a case") == {"a": 1, "b": 2}
    (tmp_path / "a.yaml").write_text("a: 1\nb: [2]\n")
    with pytest.raises(UserError, match="values"):
        read_yaml(tmp_path / "a.yaml", "a case")
    monkeypatch.setattr(load, "MOST_VALUES", 7)
    (tmp_path / "a.yaml").write_text("a: &x [1]\nb: *x\n")  # an alias counts as what it stands for
    assert read_yaml(tmp_path / "a.yaml", "a case") == {"a": [1], "b": [1]}
    monkeypatch.setattr(load, "MOST_VALUES", 6)
    with pytest.raises(UserError, match="values"):
        read_yaml(tmp_path / "a.yaml", "a case")


def test_values_are_counted_while_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MOST_VALUES", 5)
    (tmp_path / "a.yaml").write_text("[1, 2, 3, 4, 5]]")  # what follows is no YAML, and is not reached
    with pytest.raises(UserError, match="values"):
        read_yaml(tmp_path / "a.yaml", "a case")


def test_a_file_may_have_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("a: 1\n")
    monkeypatch.setattr(load, "LARGEST_FILE", 5)
    assert read_yaml(tmp_path / "a.yaml", "a case") == {"a": 1}
    monkeypatch.setattr(load, "LARGEST_FILE", 4)
    with pytest.raises(UserError):
        read_yaml(tmp_path / "a.yaml", "a case")


def refused(text: str) -> bool:
    """Whether it is refused as too intricate; other errors are raised."""
    try:
        pattern(text, "where")
    except UserError as error:
        if "is too intricate" not in str(error):
            raise
        return True
    return False


def test_patterns_up_to_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not refused("a" * LONGEST)
    assert refused("a" * (LONGEST + 1))
    assert not refused("|".join("a" * MOST_ALTERNATIVES))
    assert refused("|".join("a" * (MOST_ALTERNATIVES + 1)))
    assert not refused("x.*" * MOST_REPEATS)
    assert refused("x.*" * (MOST_REPEATS + 1))
    assert not refused("(" + "|".join(["x.*" * MOST_REPEATS] * 2) + ")")  # one of the branches
    assert refused("(x.*|y)" * (MOST_REPEATS + 1))
    monkeypatch.setattr(patterns, "MOST_ALTERNATIVES", 6)
    assert not refused("(a|b)(c|d|e)")
    assert refused("(a|b)(c|d)(e|f)")
    assert not refused("((a|b)c|d)e|f")
    for unmatched in ("(", ")", "(a))", "((a)"):
        assert refused(unmatched)
