"""Variants of costly tests that only `bash test.sh thorough` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def thorough_but(values: Iterable[Any], *usual: Any) -> list[Any]:
    """The values of a parameter, of which all but `usual` are thorough ones."""
    return [value if value in usual else pytest.param(value, marks=pytest.mark.thorough) for value in values]
