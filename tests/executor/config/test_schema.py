"""What is refused of keys and values, and how keys are set, with a small schema of its own."""

from dataclasses import dataclass
from typing import Any

import pytest

from executor.config.schema import key, override, read, section
from umbra.errors import UserError


@dataclass(frozen=True)
class Inner:
    size: int | None = key(None, "a size", means={0: None, -1: 0}, minimum=-1, maximum=9)
    names: tuple[str, ...] = key((), "names")
    rate: float | None = key(0.5, "a rate", minimum=0.25)


@dataclass(frozen=True)
class Outer:
    title: str = key("", "a title")
    mode: str = key("auto", "a mode", choices=("auto", "on", "off"))
    flag: bool = key(False, "a flag")
    inner: Inner = section(Inner)
    hidden: int = 7


def refusal(data: object) -> str:
    with pytest.raises(UserError) as caught:
        read(Outer, data, "file")
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ([1], "file: the file must be a mapping of keys to values, not [1]"),
        ({"inner": 5}, "file: key inner must be a mapping of keys to values, not 5"),
        ({"hidden": 8}, "file: unknown key 'hidden'; all keys: docs/config.md"),
        ({"titel": ""}, "file: unknown key 'titel', did you mean 'title'?; all keys: docs/config.md"),
        ({"iner": {}}, "file: unknown key 'iner', did you mean 'inner'?; all keys: docs/config.md"),
        ({"inner": {"sise": 1}}, "file: unknown key 'inner.sise', did you mean 'size'?; all keys: docs/config.md"),
        ({"mode": "of"}, "file: mode: 'of' is not one of auto, on, off, did you mean 'off'?"),
        ({"flag": 1}, "file: flag: 1 is not true or false"),
        ({"title": None}, "file: title: None is not a string"),
        ({"inner": {"size": -2}}, "file: inner.size: -2 must be at least -1"),
        ({"inner": {"size": 10}}, "file: inner.size: 10 must be at most 9"),
        ({"inner": {"size": True}}, "file: inner.size: True is not an integer"),
        ({"inner": {"rate": 0.2}}, "file: inner.rate: 0.2 must be at least 0.25"),
        ({"inner": {"rate": float("nan")}}, "file: inner.rate: nan must be at least 0.25"),
        ({"inner": {"rate": "x"}}, "file: inner.rate: 'x' is not a number or null"),
        ({"inner": {"names": "ab"}}, "file: inner.names: 'ab' is not a list, each a string"),
        ({"title": "\ud800"}, "file: title: '\\ud800' has half of a surrogate pair: not text"),
    ],
)
def test_values_that_are_refused(data: object, error: str) -> None:
    assert refusal(data) == error


def test_keys_are_set_by_full_and_by_bare_names() -> None:
    data: dict[str, Any] = {"inner": {"size": 1}}
    override(Outer, data, "rate", 2.0)
    override(Outer, data, "inner.size", 3)
    override(Outer, data, "title", "x")
    assert data == {"inner": {"size": 3, "rate": 2.0}, "title": "x"}
    for name, near in (("sizes", ", did you mean 'size'?"), ("inner.sizes", ", did you mean 'inner.size'?"), ("q", "")):
        with pytest.raises(UserError) as caught:
            override(Outer, data, name, 1, "docs/other.md")
        assert str(caught.value) == f"{name}: unknown key{near}; all keys: docs/other.md"
    with pytest.raises(UserError, match=r"all keys: docs/config\.md$"):
        override(Outer, data, "q", 1)
    odd: dict[str, Any] = {"inner": 5}
    override(Outer, odd, "size", 1)
    assert odd == {"inner": 5}  # which `read` refuses
    new: dict[str, Any] = {}
    override(Outer, new, "size", 4)
    assert new == {"inner": {"size": 4}}
