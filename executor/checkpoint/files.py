"""The safetensors files of a checkpoint: which tensors they hold, and parts of them through memory maps.

The files are untrusted: everything that is wrong with them is a UserError that names the file.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from umbra.base.errors import UserError, listed
from umbra.executor.checkpoint.header import BITS, check_header
from umbra.executor.checkpoint.index import INDEX, SINGLE, in_model, read_index, weights_in

NO_ALIASES: Mapping[str, str] = MappingProxyType({})
MAPPED = 256 << 20  # bytes read before all maps are dropped: mapped pages count as memory of this process


class TensorFiles(Protocol):
    """The tensors of the checkpoint in `folder` by the model's names; an instance called with a name and slices reads
    that part."""

    folder: Path  # or the file, for messages
    read: int  # bytes in total
    file_of: dict[str, Path]  # the file that each tensor is in

    def __contains__(self, name: str) -> bool: ...

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, name of the type) of a tensor"""

    def nbytes(self, name: str) -> int:
        """The bytes of a tensor; 0 if there is none."""

    def __call__(self, name: str, *part: slice) -> Tensor: ...

    def relieve(self) -> None:
        """Drops the maps if many bytes were read through them; called between tensors."""


class CheckpointFiles:
    """The tensors of safetensors files. `aliases` maps parts of the files' names to the model's."""

    def __init__(self, folder: Path, aliases: Mapping[str, str] = NO_ALIASES):
        self.folder, self.aliases = folder, aliases
        self.read = 0
        self._maps: dict[Path, safe_open] = {}
        self._mapped = 0
        self.file_of: dict[str, Path] = {}
        self._names: dict[str, str] = {}  # the name that each tensor has there
        path = weights_in(folder)
        if path is None:
            raise UserError(f"{folder} holds neither {SINGLE} nor {INDEX}: other formats are not read")
        if path.suffix == ".json":
            self._open_indexed(path)
        else:
            self._open([path])

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        header = self._map(self.file_of[name]).get_slice(self._names[name])
        return tuple(header.get_shape()), header.get_dtype()

    def nbytes(self, name: str) -> int:
        if name not in self:
            return 0
        shape, kind = self.header(name)
        return prod(shape) * BITS[kind] // 8

    def __call__(self, name: str, *part: slice) -> Tensor:
        try:
            tensor: Tensor = self._map(self.file_of[name]).get_slice(self._names[name])[part]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.file_of[name]}: {name}: truncated or corrupt: {error}") from None
        self.read += tensor.nbytes
        self._mapped += tensor.nbytes
        return tensor

    def relieve(self) -> None:
        if self._mapped > MAPPED:
            self._maps.clear()
            self._mapped = 0

    def _map(self, path: Path) -> safe_open:
        if path not in self._maps:
            try:
                self._maps[path] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise UserError(f"{path}: truncated or corrupt: {error}") from None
            except (OSError, RuntimeError) as error:  # the latter comes from PyTorch, which maps the file
                raise UserError(f"{path}: cannot be opened: {_why_not_opened(path) or error}") from None
        return self._maps[path]

    def _open(self, paths: list[Path]) -> None:
        for path in paths:
            check_header(path)
            for name, theirs in in_model(self._map(path).keys(), self.aliases, path).items():
                if name in self.file_of:
                    raise UserError(f"{path}: tensor {name} is also in {self.file_of[name].name}")
                self.file_of[name], self._names[name] = path, theirs

    def _open_indexed(self, index: Path) -> None:
        listed_in = read_index(index)
        self._open([self.folder / name for name in sorted(set(listed_in.values()))])
        expected = {name: listed_in[theirs] for name, theirs in in_model(listed_in, self.aliases, index).items()}
        astray = [name for name, file in expected.items() if self.file_of.get(name) != self.folder / file]
        if astray:
            raise UserError(f"{index}: tensors that are not in the file the index names: {listed(sorted(astray))}")


def _why_not_opened(path: Path) -> str:
    """Returns the system's error; the library says of every file that it cannot open that there is none."""
    try:
        open(path, "rb").close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
