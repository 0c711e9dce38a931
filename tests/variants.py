"""Variants of costly tests that only `bash test.sh thorough` runs."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thorough_but(values: Iterable[Any], *usual: Any) -> list[Any]:
    """The values of a parameter, of which all but `usual` are thorough ones."""
    return [value if value in usual else pytest.param(value, marks=pytest.mark.thorough) for value in values]


def thorough_after(usual: int, values: Iterable[Any]) -> list[Any]:
    """Returns the values of a parameter, or tuples of several parameters' values, of which all but the first `usual`
    are thorough ones."""
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=[pytest.mark.thorough] * (i >= usual)) for i, value in enumerate(several)]


def covering(*parameters: Sequence[Any]) -> list[Any]:
    """Returns the product of the parameters' values, of which all are thorough ones but a few that have each value once
    (or more often, where another parameter has more)."""
    most = max(map(len, parameters))
    usual = {tuple(i % len(values) for values in parameters) for i in range(most)}
    return [
        pytest.param(
            *(values[i] for values, i in zip(parameters, chosen, strict=True)),
            marks=[] if chosen in usual else [pytest.mark.thorough],
        )
        for chosen in itertools.product(*(range(len(values)) for values in parameters))
    ]
