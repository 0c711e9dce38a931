"""Streams a safetensors checkpoint into a model, this rank's share only, and proves that nothing is left over.

The proof comes first, from the files' headers: every tensor is wanted or known to be ignorable, every wanted tensor is
there with the right shape, the pieces cover every parameter. Only then is data read, one tensor at a time, through
memory maps: the peak is what the rank keeps plus one slice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from errors import UserError, listed
from executor.ready import INDEX, SINGLE
from executor.safetensors_header import check_header
from models.hf_config import read_json
from models.layers import Piece, layers_of

MAPPED = 256 << 20  # bytes of a file that are read before its map is dropped: mapped pages count as our memory
FLOATS = ("BF16", "F16", "F32")


def load_checkpoint(model: nn.Module, folder: Path, ignored: frozenset[str], progress: bool) -> None:
    wanted: dict[str, list[Piece]] = {}
    for place, layer in layers_of(model):
        pieces = list(layer.pieces(place))
        if sum(p.kept_elements for p in pieces) != layer.elements:
            raise AssertionError(f"the pieces of {place} do not fill it exactly")  # a bug in the layer
        for piece in pieces:
            wanted.setdefault(piece.name, []).append(piece)
    files = _files(folder)
    _prove_headers(files, wanted, ignored)
    bar = tqdm(total=len(wanted), desc="loading", unit="tensor", disable=None if progress else True, leave=False)
    for path, names in files.items():
        while names:
            names = _fill_some(path, names, wanted, bar)
    bar.close()


def _fill_some(path: Path, names: list[str], wanted: dict[str, list[Piece]], bar: tqdm) -> list[str]:  # type: ignore[type-arg]
    """Fill from the tensors of one file until MAPPED bytes of it are in memory; returns the names that are left."""
    read = 0
    with _open(path) as file:
        for i, name in enumerate(names):
            for piece in wanted.get(name, []):
                if piece.fill is not None:
                    part = file.get_slice(name)[piece.part]
                    piece.fill(part)
                    read += part.nbytes
            bar.update(name in wanted)
            if read > MAPPED:
                return names[i + 1 :]
    return []


def random_weights(model: nn.Module, seed: int) -> None:
    """Fill every weight for benchmarks: zero-mean, with the scale of a trained model, at the speed of memory.

    All matrices are cut from one block of random numbers whose length shares no factor with a row, so that no two
    rows or experts are equal; norms are ones.
    """
    block = torch.randn((1 << 22) - 3, generator=torch.Generator().manual_seed(seed)) * 0.02
    offset = 0
    for path, layer in layers_of(model):
        for piece in layer.pieces(path):
            if piece.fill is None:
                continue
            if len(piece.shape) == 1:
                piece.fill(torch.ones(piece.kept_shape))
                continue
            parts, missing = [], piece.kept_elements
            while missing:
                parts.append(block[offset : offset + missing])
                offset = (offset + len(parts[-1])) % len(block)
                missing -= len(parts[-1])
            piece.fill(torch.cat(parts).view(piece.kept_shape))


def _files(folder: Path) -> dict[Path, list[str]]:
    """Every safetensors file of the checkpoint with the tensors it holds."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        paths = [single]
        listed_in = None
    elif index.is_file():
        listed_in = read_json(index).get("weight_map")
        if not isinstance(listed_in, dict) or not listed_in or not all(isinstance(v, str) for v in listed_in.values()):
            raise UserError(f"{index}: weight_map must map tensor names to file names")
        for name in listed_in.values():
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise UserError(f"{index}: {name!r:.80} is not the name of a .safetensors file in the same folder")
        paths = [folder / name for name in sorted(set(listed_in.values()))]
    else:
        raise UserError(f"model_path: {folder} holds neither {SINGLE} nor {INDEX} (other formats are not read)")
    files: dict[Path, list[str]] = {}
    place: dict[str, Path] = {}
    for path in paths:
        check_header(path)
        with _open(path) as file:
            files[path] = list(file.keys())
        for name in files[path]:
            if name in place:
                raise UserError(f"{path}: tensor {name} is also in {place[name].name}")
            place[name] = path
    if listed_in is not None:
        astray = [n for n, file_name in listed_in.items() if place.get(n) != folder / file_name]
        if astray:
            raise UserError(f"{index}: tensors that are not in the file the index names: {listed(sorted(astray))}")
    return files


def _prove_headers(files: dict[Path, list[str]], wanted: dict[str, list[Piece]], ignored: frozenset[str]) -> None:
    there = {name for names in files.values() for name in names}
    wrong = []
    for path, names in files.items():
        with _open(path) as file:
            for name in names:
                if name not in wanted:
                    continue
                header = file.get_slice(name)
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                for piece in wanted[name]:
                    if shape != piece.shape:
                        wrong.append(f"{name} has shape {list(shape)}, expected {list(piece.shape)}")
                if dtype not in FLOATS:
                    wrong.append(f"{name} has type {dtype}, expected one of {', '.join(FLOATS)}")
    folder = next(iter(files)).parent
    for problem, names in (
        ("tensors missing", sorted(wanted.keys() - there)),
        ("tensors that the model does not know", sorted(there - wanted.keys() - ignored)),
        ("tensors that do not fit", wrong),
    ):
        if names:
            raise UserError(f"{folder}: {len(names)} {problem}: {listed(names)}")


@contextmanager
def _open(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: truncated or corrupt: {error}") from None
