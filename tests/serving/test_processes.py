"""How the processes of a server end."""

import os
from collections.abc import Callable

import pytest

from errors import UserError
from executor.serving.processes import run_and_leave


def fails(argv: list[str]) -> None:
    raise ValueError("the cup is empty")


def is_refused(argv: list[str]) -> None:
    raise UserError("the cup is empty")


def ends_with_three(argv: list[str]) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("main", "status", "traceback"),
    [(lambda argv: None, 0, False), (is_refused, 2, False), (ends_with_three, 3, False), (fails, 1, True)],
)
def test_the_status_is_that_of_what_ran(
    main: Callable[[list[str]], None], status: int, traceback: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only what nobody foresaw has a traceback."""
    if not (child := os.fork()):
        run_and_leave(main)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    printed = capfd.readouterr().err
    assert ("Traceback" in printed) == traceback
    assert ("the cup is empty" in printed) == (main in (fails, is_refused))
