"""The outcome of a case of a stage: one line of the report."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PASS, FAIL, SKIPPED = "pass", "FAIL", "skipped"

Measured = dict[str, Any]  # numbers, and rows of numbers, under names that constants.py knows


@dataclass(frozen=True)
class Passed:
    """The text and the measurements of a case that passed."""

    text: str = ""
    measured: Measured = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A case to run: `run` raises if it fails, and Skipped if this machine has no use for it."""

    name: str
    run: Callable[[], Passed]


class Skipped(Exception):
    """Why a case was not run."""


@dataclass(frozen=True)
class Outcome:
    stage: str
    case: str
    result: str  # PASS, FAIL or SKIPPED
    seconds: float = 0.0
    text: str = ""  # what was found, why it was skipped, or the cause of a failure, in one line
    hint: str = ""  # what to do about a failure
    measured: Measured = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Outcome":
        return cls(**data)
