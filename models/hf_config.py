"""Reads a checkpoint's config.json, which is untrusted input and comes from two generations of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbra.base.errors import UserError, short
from umbra.base.files import read_json

LONGEST_NAME = 300
LARGEST_SIZE = 1 << 24  # far above any dimension of a real model
SMALLEST, LARGEST = 1e-30, 1e30  # bounds of numbers, so that products of them neither vanish nor overflow


class HfConfig:
    """Typed, bounded access to the keys of one config.json; `where` names the file in error messages."""

    def __init__(self, data: Mapping[str, Any], where: str):
        self.data = data
        self.where = where

    def error(self, key: str, rule: str) -> UserError:
        return UserError(f"{self.where}: {key}: {short(self.data.get(key))} {rule}")

    def value(self, *names: str, default: Any = None) -> Any:
        """The value of the first of `names`, older and newer names of one key, that is present and not null."""
        return next((self.data[n] for n in names if self.data.get(n) is not None), default)

    def size(self, *names: str, default: int | None = None, minimum: int = 1, maximum: int = LARGEST_SIZE) -> int:
        value = self.value(*names, default=default)
        if value is None:
            raise UserError(f"{self.where}: key {names[0]!r} is missing")
        if type(value) is not int or not minimum <= value <= maximum:
            raise UserError(f"{self.where}: {names[0]}: {short(value)} must be an integer from {minimum} to {maximum}")
        return value

    def number(self, *names: str, default: float) -> float:
        value = self.value(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not SMALLEST <= value <= LARGEST:
            raise UserError(
                f"{self.where}: {names[0]}: {short(value)} must be a positive number from {SMALLEST} to {LARGEST}"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.value(name, default=default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def sizes(self, name: str) -> tuple[int, ...]:
        values = self.value(name, default=[])
        if not isinstance(values, list) or not all(type(v) is int and 0 <= v <= LARGEST_SIZE for v in values):
            raise self.error(name, "must be a list of non-negative integers")
        return tuple(values)

    def names(self, name: str) -> tuple[str, ...]:
        values = self.value(name, default=[])
        if not isinstance(values, list) or not all(isinstance(v, str) and 0 < len(v) <= LONGEST_NAME for v in values):
            raise self.error(name, "must be a list of names")
        return tuple(values)

    def one_of(self, *names: str, allowed: tuple[Any, ...]) -> Any:
        """The value of a required key that has several names; it must be one of `allowed`."""
        value = self.value(*names)
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise UserError(f"{self.where}: {names[0]}: {short(value)} must be one of {', '.join(map(str, allowed))}")
        return value

    def inner(self, name: str) -> "HfConfig":
        """Access to the mapping that the key holds."""
        value = self.value(name)
        if not isinstance(value, dict):
            raise self.error(name, "must be a mapping")
        return HfConfig(value, f"{self.where}: {name}")

    @property
    def text(self) -> "HfConfig":
        """Access to what reads text in a model that may also see pictures."""
        return self if self.value("text_config") is None else self.inner("text_config")

    def one_or_more(self, name: str) -> tuple[int, ...]:
        """The sizes under a key that holds one number, a list of them, or nothing."""
        value = self.value(name, default=[])
        return HfConfig({name: value if isinstance(value, list) else [value]}, self.where).sizes(name)

    def refuse(self, name: str, *allowed: Any) -> None:
        """Raises unless `name` is absent, null or one of `allowed`: other values are not implemented."""
        if self.data.get(name) not in (None, *allowed):
            raise self.error(name, "is not implemented")


def read_hf_config(folder: Path) -> HfConfig:
    """The config.json in `folder`."""
    if not folder.is_dir():
        raise UserError(
            f"model_path: {folder} is not a folder: put the checkpoint there, or set model_path to its folder"
        )
    return HfConfig(read_json(folder / "config.json"), str(folder / "config.json"))
