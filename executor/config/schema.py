"""Reads a mapping into a tree of frozen dataclasses, strictly; which keys there are is declared elsewhere.

A leaf is declared with `key(default, doc, ...)`; a section is a field whose type is another such dataclass.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from umbra.base.errors import UserError, short

T = TypeVar("T")
# Numbers that have a special meaning in a file: the values that they become, where None is "chosen for you" or "no
# limit", and 0 none.
OPEN: Mapping[Any, int | None] = {0: None}
OPEN_OR_NONE: Mapping[Any, int | None] = {0: None, -1: 0}


@dataclass(frozen=True)
class Leaf:
    """One key of the tree: its path and the values that it may have."""

    path: str
    type: Any
    default: Any
    doc: str
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    means: Mapping[Any, int | None]
    elsewhere: tuple[str, ...]
    bare: bool

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def written_default(self) -> Any:
        """The default as a file would have it."""
        return next((written for written, value in self.means.items() if value == self.default), self.default)

    @property
    def type_name(self) -> str:
        name = type_name(typing.get_args(self.type)[0] if self.means else self.type)
        return " or ".join((name, *(word for word in self.means if isinstance(word, str))))


def key(
    default: Any,
    doc: str,
    *,
    choices: Sequence[str] | Callable[[], Sequence[str]] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    means: Mapping[Any, int | None] = types.MappingProxyType({}),
    elsewhere: Sequence[str] = (),
    bare: bool = True,
) -> Any:
    """A leaf. `choices` has the values that it may have, or says them when the key is read. `means` has the numbers and
    words that stand for something else in a file, and the values that they become: `{0: None, -1: 0}` for "0: chosen
    for you, -1: none". `elsewhere` has the names that other engines give the key, which the command line and `LLM` take
    as well; in a file they are errors that name the key. If not `bare`, the name alone is the key of another
    section."""
    return dataclasses.field(
        default=default,
        metadata=dict(
            doc=doc,
            choices=choices,
            minimum=minimum,
            maximum=maximum,
            means=means,
            elsewhere=tuple(elsewhere),
            bare=bare,
        ),
    )


def section(kind: type[T]) -> T:
    return dataclasses.field(default_factory=kind)


def leaves(kind: type, prefix: str = "") -> Iterator[Leaf]:
    """Every key below the dataclass `kind`, in order of declaration."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        path = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from leaves(typing.cast(type, hints[field.name]), path + ".")
        elif field.metadata:
            choices = field.metadata["choices"]
            settings = {**field.metadata, "choices": tuple(choices() if callable(choices) else choices)}
            yield Leaf(path, hints[field.name], field.default, **settings)


def read(kind: type[T], data: object, where: str, docs: str = "docs/config.md") -> T:
    """`data`, a mapping read from YAML, as a `kind`; `where` names the file in every error, `docs` where its keys are
    described."""
    return _read(kind, data, where, "", docs)


def override(
    kind: type, data: dict[str, Any], name: str, value: object, docs: str = "docs/config.md", flag: str = ""
) -> None:
    """Set one key of `data` by its full path, or by its bare name if only one section has it. `flag` is the option that
    the user has given it with, for errors: `--set `, or none."""
    keys = list(leaves(kind))
    paths = [leaf.path for leaf in keys]
    if name not in paths:
        named = [leaf.path for leaf in keys if leaf.name == name and leaf.bare]
        if len(named) > 1:
            raise UserError(f"{flag}{name}: ambiguous, give one of {', '.join(named)}")
        if not named:
            options = list(dict.fromkeys([*paths, *(leaf.name for leaf in keys)]))
            raise UserError(f"{flag}{name}: unknown key{_nearest_key(name, keys, options)}; all keys: {docs}")
        name = named[0]
    *sections, last = name.split(".")
    for part in sections:
        below = data.setdefault(part, {})
        if not isinstance(below, dict):
            return  # the section is not a mapping: read() raises
        data = below
    data[last] = value


def _read(kind: type[T], data: object, where: str, prefix: str, docs: str) -> T:
    if not isinstance(data, Mapping):
        at = f"key {prefix[:-1]}" if prefix else "the file"
        raise UserError(f"{where}: {at} must be a mapping of keys to values, not {short(data):.60}")
    known = {leaf.path: leaf for leaf in leaves(kind, prefix)}
    hints = typing.get_type_hints(kind)
    sections = {f.name: hints[f.name] for f in dataclasses.fields(typing.cast(Any, kind)) if not f.metadata}
    sections = {name: t for name, t in sections.items() if dataclasses.is_dataclass(t)}
    values: dict[str, Any] = {}
    for name, value in data.items():
        path = f"{prefix}{name}"
        if name in sections:
            values[name] = _read(sections[name], {} if value is None else value, where, path + ".", docs)
        elif path in known:
            values[name] = _leaf(known[path], value, where)
        else:
            options = [p[len(prefix) :] for p in known if "." not in p[len(prefix) :]] + list(sections)
            near = _nearest_key(str(name), leaves(kind, prefix), options)
            raise UserError(f"{where}: unknown key {path!r:.200}{near}; all keys: {docs}")
    return kind(**values)


def _leaf(leaf: Leaf, value: object, where: str) -> object:
    if isinstance(value, bool) and "on" in leaf.choices:  # what YAML makes of `on` and `off`
        value = "on" if value else "off"
    if isinstance(value, str) and value in leaf.means:
        return leaf.means[value]
    try:
        converted = _convert(leaf.type, value)
    except UnicodeEncodeError:
        raise UserError(f"{where}: {leaf.path}: {short(value):.80} has half of a surrogate pair: not text") from None
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{where}: {leaf.path}: {short(value):.80} is not {leaf.type_name}") from None
    if leaf.choices and converted not in leaf.choices:
        near = _nearest(str(converted), list(leaf.choices))
        raise UserError(f"{where}: {leaf.path}: {converted!r:.80} is not one of {', '.join(leaf.choices)}{near}")
    if isinstance(converted, int | float) and not isinstance(converted, bool):
        if leaf.minimum is not None and not converted >= leaf.minimum:
            raise UserError(f"{where}: {leaf.path}: {converted} must be at least {leaf.minimum}")
        if leaf.maximum is not None and not converted <= leaf.maximum:
            raise UserError(f"{where}: {leaf.path}: {converted} must be at most {leaf.maximum}")
    if isinstance(converted, int | float) and converted in leaf.means:
        return leaf.means[int(converted)]
    return converted


def _convert(wanted: Any, value: object) -> object:
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError
        return tuple(_convert(typing.get_args(wanted)[0], v) for v in value)
    if isinstance(wanted, types.UnionType):  # X | None
        return None if value is None else _convert(typing.get_args(wanted)[0], value)
    if wanted is float and (isinstance(value, str) or type(value) is int):
        return float(typing.cast(Any, value))  # YAML reads 1e-3 as a string
    if type(value) is not wanted:
        raise TypeError
    if isinstance(value, str):
        value.encode()  # raises for half of a surrogate pair, which YAML can write and no tokenizer takes
    return value


def type_name(wanted: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    if typing.get_origin(wanted) is tuple:
        return f"a list, each {type_name(typing.get_args(wanted)[0])}"
    if isinstance(wanted, types.UnionType):
        return f"{type_name(typing.get_args(wanted)[0])} or null"
    return names[wanted]


def _nearest_key(name: str, keys: Iterable[Leaf], options: list[str]) -> str:
    """The key that `name` may mean: the one that other engines call so, or else the most similar of `options`."""
    meant = next((leaf.path for leaf in keys if name in leaf.elsewhere), None)
    return f", did you mean {meant!r}?" if meant else _nearest(name, options)


def _nearest(name: str, options: list[str]) -> str:
    close = difflib.get_close_matches(name[:200], options, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""
