"""Logits are written to a file, or one line says why not before any rank starts."""

from pathlib import Path
from typing import Any

import pytest

from umbra.commands import logits
from umbra.commands.logits import write_logits
from umbra.errors import UserError


def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(logits, "launch", lambda *given: found.append(given))
    return found


@pytest.mark.parametrize(
    ("ids", "steps", "said"),
    [
        ("1,2", -1, "--steps -1: must not be negative"),
        ("1,2", 5000, r"input_max_len \+ max_new_tokens: 5003 exceed the model's \d+ positions"),
        ("1,99999", 1, "99999"),
    ],
)
def test_what_cannot_be_asked_starts_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: str, steps: int, said: str
) -> None:
    launched = started(monkeypatch)
    with pytest.raises(UserError, match=said):
        write_logits("demo", ["world_size=2"], ids, steps, tmp_path / "out.npz", None, ["program"])
    assert launched == []


def test_ranks_start_for_the_lengths_that_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = started(monkeypatch)
    write_logits("demo", ["world_size=2"], "1,2,3;4", 7, tmp_path / "out.npz", None, ["program"])
    ((case, program),) = launched
    assert program == ["program"]
    data = case.data_config
    assert (data.input_max_len, data.max_new_tokens, data.batch_size) == (3, 8, 2)
    assert not (tmp_path / "out.npz").exists()
