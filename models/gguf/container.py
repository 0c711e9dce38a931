"""Reads the header of a GGUF file, which is untrusted: its metadata, and where its tensors lie.

The layout: "GGUF", version, numbers of tensors and keys; keys with typed values; for each tensor its name, shape with
the columns first, type and offset; from the next multiple of `general.alignment` on the tensors' bytes, each padded to
such a multiple. Numbers are little-endian. Every count is compared with the bytes that are left before it is used.
"""

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from umbra.base.errors import UserError, short
from umbra.base.files import check_pointer
from umbra.models.gguf.types import TYPES, name_of

LARGEST_HEADER = 256 << 20  # bytes; those of models with 200,000 tokens have about 20 MB
MOST_VALUES = 1 << 22  # of all keys together
MOST_TENSORS = 1 << 14
LONGEST_KEY, LONGEST_NAME = 256, 63  # characters; llama.cpp's own limit of tensors' names
LONGEST_TEXT = 4 << 20  # bytes of one value
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
MOST_PARTS = 4096


@dataclass(frozen=True)
class TensorInfo:
    kind: str  # name of its type
    shape: tuple[int, ...]  # rows before columns
    part: int  # number of the file
    offset: int  # in the file
    nbytes: int


@dataclass(frozen=True)
class Gguf:
    """The header of a file, or of all parts of one that is split."""

    paths: list[Path]
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def parts_of(path: Path) -> list[Path]:
    """The files of the model whose first, or only, file is `path`."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    name, number, count = match[1], int(match[2]), int(match[3])
    if number != 1 or not 1 <= count <= MOST_PARTS:
        raise UserError(f"{path}: give the first of its parts, {name}-00001-of-{match[3]}.gguf")
    return [path.with_name(f"{name}-{part:05}-of-{match[3]}.gguf") for part in range(1, count + 1)]


def read_gguf(path: Path) -> Gguf:
    """Raises UserError for a file that is truncated or breaks a rule of the format."""
    paths = parts_of(path)
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(paths):
        keys, part_tensors = _read(part, number)
        metadata = metadata or keys
        said = (keys.get("split.no", 0), keys.get("split.count") or 1)
        if said != (number, len(paths)):
            raise UserError(
                f"{part}: split.no and split.count say part {said[0]} of {short(said[1])}, the name says "
                f"{number} of {len(paths)}, from 0: keep the names that the files had"
            )
        if repeated := tensors.keys() & part_tensors.keys():
            raise UserError(f"{part}: tensor {min(repeated)} is also in another part")
        tensors |= part_tensors
    if len(tensors) != metadata.get("split.tensors.count", len(tensors)):
        count = short(metadata["split.tensors.count"])
        raise UserError(f"{path}: split.tensors.count: {count}, but the parts have {len(tensors)} tensors")
    return Gguf(paths, metadata, tensors)


def _read(path: Path, part: int) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    try:
        with open(path, "rb") as file:
            begin = file.read(64)
            check_pointer(path, begin)
            if begin[:4] != b"GGUF":
                raise ValueError("does not begin with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(data).read(part)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnreadTypeError as error:
        raise UserError(f"{path}: {error}") from None
    except ValueError as error:
        raise UserError(f"{path}: truncated or corrupt: {error}") from None


class UnreadTypeError(ValueError):
    """A tensor has a type that Umbra does not read, in a file that is as it should be."""


class _Header:
    """A position in the header, which moves on as it is read. Raises ValueError for whatever is wrong."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at, self.values = data, 4, 0
        self.end = min(len(data), LARGEST_HEADER)

    def read(self, part: int) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        version = self.scalar("I", "version")
        if version not in (2, 3):
            why = "its numbers are big-endian" if version in (2 << 24, 3 << 24) else "only 2 and 3 are read"
            raise ValueError(f"version {version}: {why}")
        tensors, keys = self.count("tensors", 24, MOST_TENSORS), self.count("keys", 13, MOST_VALUES)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text("a key", LONGEST_KEY)
            if not key or key in metadata:
                raise ValueError(f"key {short(key)} is empty or stands twice")
            metadata[key] = self.value(key)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment: {short(alignment)} must be a power of two")
        infos = [self.tensor() for _ in range(tensors)]
        start = end = -(-self.at // alignment) * alignment
        by_name: dict[str, TensorInfo] = {}
        for name, kind, shape, offset in infos:
            expected = -(-end // alignment) * alignment
            if start + offset != expected:
                raise ValueError(f"tensor {name} has offset {offset}, where {expected - start} was expected")
            nbytes = prod(shape) // kind.columns * kind.nbytes
            end = expected + nbytes
            if end > len(self.data):
                raise ValueError(f"tensor {name} ends at byte {end} of {len(self.data)}")
            if name in by_name:
                raise ValueError(f"tensor {name} stands twice in the header")
            by_name[name] = TensorInfo(kind.name, shape, part, expected, nbytes)
        if len(self.data) > max(-(-end // alignment) * alignment, self.at):
            raise ValueError(f"{len(self.data)} bytes, but the header tells of {end}")
        return metadata, by_name

    def tensor(self) -> tuple[str, Any, tuple[int, ...], int]:
        name = self.text("a tensor's name", LONGEST_NAME)
        if not name or not name.isprintable():
            raise ValueError(f"tensor {name!r}: its name is empty or not printable")
        dims = self.scalar("I", name)
        if not 1 <= dims <= 4:
            raise ValueError(f"tensor {name} has {dims} dimensions, of 1 to 4")
        shape = tuple(self.scalar("Q", name) for _ in range(dims))[::-1]
        id, offset = self.scalar("I", name), self.scalar("Q", name)
        if id not in TYPES:
            names = ", ".join(kind.name for kind in TYPES.values())
            raise UnreadTypeError(f"tensor {name} has type {name_of(id)}, which is not read, only {names}")
        kind = TYPES[id]
        if 0 in shape or prod(shape) >= 1 << 60:
            raise ValueError(f"tensor {name} has shape {list(shape)}")
        if shape[-1] % kind.columns:
            raise ValueError(f"tensor {name}: {shape[-1]} columns are no multiple of {kind.name}'s {kind.columns}")
        return name, kind, shape, offset

    def value(self, key: str) -> Any:
        kind = self.scalar("I", key)
        if kind == LIST:
            kind = self.scalar("I", key)
            if kind == TEXT:
                return [self.text(key, LONGEST_TEXT) for _ in range(self.count(key, 8, MOST_VALUES))]
            code = self.code(kind, key)
            size = struct.calcsize(f"<{code}")
            count = self.count(key, size, MOST_VALUES)
            return list(struct.unpack(f"<{count}{code}", self.take(count * size, key)))
        return self.text(key, LONGEST_TEXT) if kind == TEXT else self.scalar(self.code(kind, key), key)

    def code(self, kind: int, key: str) -> str:
        if kind not in SCALARS:
            raise ValueError(f"key {key:.200}: type {kind} is {'a list in a list' if kind == LIST else 'unknown'}")
        return SCALARS[kind]

    def count(self, what: str, least: int, most: int) -> int:
        """A number of things of at least `least` bytes, of which all values together may be `most`."""
        count: int = self.scalar("Q", what)
        self.values += count
        if self.values > most or count * least > self.end - self.at:
            raise ValueError(f"{what:.200}: a count of {count} is more than fits or is allowed")
        return count

    def text(self, what: str, longest: int) -> str:
        size = self.scalar("Q", what)
        if size > longest:
            raise ValueError(f"{what:.200}: a text of {size} bytes, more than {longest}")
        try:
            return self.take(size, what).decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what:.200}: not UTF-8") from None

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def take(self, size: int, what: str) -> bytes:
        if size > self.end - self.at:
            raise ValueError(f"{what:.200}: the header ends within it")
        self.at += size
        return self.data[self.at - size : self.at]
