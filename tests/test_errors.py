"""The line for what the system refuses; anything else keeps its traceback."""

import pytest
import torch

from umbra.base.errors import REFUSED_STATUS, UserError, refusal, run_main


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError("std::bad_alloc"), "out of memory: an allocation was refused: "),
        (ConnectionError("the other\x1b[2J end is gone"), "the other [2J end is gone"),
    ],
)
def test_what_the_system_refuses_is_one_line(error: Exception, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: list[str]) -> None:
        raise error

    with pytest.raises(SystemExit) as end:
        run_main(main)
    assert end.value.code == REFUSED_STATUS
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert line in said


def test_pytorch_says_what_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert f"of {1 << 60} bytes" in refusal(raised.value)


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("boom"), UserError("bad"), KeyError("memory")])
def test_bugs_are_none(error: Exception) -> None:
    assert not refusal(error)


def test_no_error_is_long() -> None:
    assert str(UserError("x" * 2000)) == "x" * 2000
    text = str(UserError("begin" + "x" * (1 << 22) + "end"))
    assert len(text) == 2000
    assert text.startswith("beginx")
    assert " ... " in text
    assert text.endswith("xend")
