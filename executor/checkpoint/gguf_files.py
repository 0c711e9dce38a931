"""The tensors of GGUF files, read as blocks through memory maps. `models/gguf` has checked where they lie."""

import mmap
import warnings
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.executor.checkpoint.files import MAPPED, CheckpointFiles, TensorFiles
from umbra.executor.checkpoint.formats.gguf import GgufScheme
from umbra.executor.checkpoint.formats.scheme import Scheme
from umbra.models.gguf.folder import Index
from umbra.models.gguf.types import BY_NAME, FLOATS


def open_files(folder: Path, scheme: Scheme) -> TensorFiles:
    """The tensors of the checkpoint in `folder`, which is of the format `scheme`."""
    return GgufFiles(scheme.index) if isinstance(scheme, GgufScheme) else CheckpointFiles(folder, scheme.aliases)


class GgufFiles:
    """A part of a tensor is read as bytes (..., rows, blocks, bytes of a block), of all blocks that have some of the
    columns; of all blocks, if its columns are in an order of their own that divides blocks."""

    def __init__(self, index: Index):
        self.folder, self.read, self.index = index.paths[0], 0, index
        self.file_of = {name: index.paths[index.tensors[view.tensor].part] for name, view in index.views.items()}
        self._maps: dict[Path, mmap.mmap] = {}
        self._mapped = 0

    def __contains__(self, name: str) -> bool:
        return name in self.index.views

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        view = self.index.views[name]
        return view.shape, self.index.tensors[view.tensor].kind

    def nbytes(self, name: str) -> int:
        if name not in self:
            return 0
        shape, kind = self.header(name)
        return prod(shape) // BY_NAME[kind].columns * BY_NAME[kind].nbytes

    def __call__(self, name: str, *part: slice) -> Tensor:
        view = self.index.views[name]
        info, path = self.index.tensors[view.tensor], self.file_of[name]
        columns, nbytes = BY_NAME[info.kind].columns, BY_NAME[info.kind].nbytes
        rows = info.shape if view.expert is not None else view.shape
        try:
            mapped = np.frombuffer(self._map(path), np.uint8, info.nbytes, info.offset)
        except ValueError as error:  # it has become shorter since its header was read
            raise UserError(f"{path}: {view.tensor}: truncated or corrupt: {error}") from None
        mapped = mapped.reshape(*rows[:-1], rows[-1] // columns, nbytes)
        *outer, last = (slice(*cut.indices(size)) for cut, size in zip(part, view.shape, strict=True))
        if view.expert is not None:
            mapped = mapped[view.expert : view.expert + 1] if mapped.ndim == 2 else mapped[view.expert]
            outer[:1] = [slice(cut.start + view.first_row, cut.stop + view.first_row) for cut in outer[:1]]
        blocks = slice(last.start // columns, -(-last.stop // columns))
        if view.rows:
            part_read = np.take(mapped, view.rows.order()[outer[0]], 0)[(slice(None), *outer[1:], blocks)]
        elif view.columns:
            part_read = mapped[tuple(outer)]
            if view.columns.size % columns == 0:
                part_read = np.take(part_read, view.columns.order(columns)[blocks], -2)
        else:
            part_read = mapped[(*outer, blocks)]
        self.read += part_read.nbytes
        self._mapped += part_read.nbytes
        if info.kind in FLOATS:
            part_read = np.array(part_read)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of blocks that cannot be written
            return torch.from_numpy(part_read if len(view.shape) > 1 else part_read[None])

    def relieve(self) -> None:
        if self._mapped > MAPPED:
            self._maps.clear()
            self._mapped = 0

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with open(path, "rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise UserError(f"{path}: cannot be opened: {error.strerror}") from None
        return self._maps[path]
