"""Streams a safetensors checkpoint into a model, this rank's share only, and proves that nothing is left over.

The proof comes first, from the files' headers: every tensor is wanted or known to be ignorable, every wanted tensor is
there with the right shape, the pieces cover every parameter. Only then is data read, one weight at a time, through
memory maps: the peak is what the rank keeps plus one weight.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from errors import UserError, listed
from executor.checkpoint.files import CheckpointFiles
from executor.checkpoint.formats.scheme import Scheme, Stored, plain
from models.layers import Piece, layers_of
from ops.format import Quantised

SIGNS = {  # tensors that only one format has
    "weight_packed": "compressed-tensors' pack-quantized",
    "weight_scale": "compressed-tensors' int-quantized or float-quantized",
    "qweight": "AWQ's or GPTQ's",
    "g_idx": "GPTQ's",
    "weight_scale_inv": "block-scaled FP8's",
}


def load_checkpoint(model: nn.Module, folder: Path, scheme: Scheme, ignored: frozenset[str], progress: bool) -> int:
    """Returns how many bytes were read."""
    wanted, files = wanted_by(model), CheckpointFiles(folder)
    stored = {name: stored_as(pieces, scheme, files.in_floats) for name, pieces in wanted.items()}
    for problem, names in problems_of(files, stored, scheme, ignored):
        raise UserError(f"{folder}: {len(names)} {problem}: {listed(names)}")
    bar = tqdm(total=len(wanted), desc="loading", unit="tensor", disable=None if progress else True, leave=False)
    with bar:
        # In the files' order: where the first of its tensors lies.
        for name in sorted(wanted, key=lambda name: str(files.place[next(iter(stored[name].tensors))])):
            for piece in wanted[name]:
                if piece.fill is not None:
                    piece.fill(_part(files, stored[name], piece))
            files.relieve()
            bar.update()
    return files.read


def wanted_by(model: nn.Module) -> dict[str, list[Piece]]:
    """The pieces of every weight by its name; a tied one has two."""
    wanted: dict[str, list[Piece]] = {}
    for place, layer in layers_of(model):
        pieces = list(layer.pieces(place))
        if sum(p.kept_elements for p in pieces) != layer.elements:
            raise AssertionError(f"the pieces of {place} do not fill it exactly")  # a bug in the layer
        for piece in pieces:
            wanted.setdefault(piece.name, []).append(piece)
    return wanted


def stored_as(pieces: list[Piece], scheme: Scheme, in_floats: Callable[[str], bool]) -> Stored:
    """Where the tensor that all these are pieces of lies. Many a config forgets to say that routers stay in floats."""
    first = pieces[0]
    module = first.name.removesuffix(".weight")
    if first.linear and scheme.quantised(module) and not (first.router and in_floats(first.name)):
        rows, columns = first.shape
        return scheme.stored(module, rows, columns)
    return plain(first.name, first.shape)


def _part(files: CheckpointFiles, stored: Stored, piece: Piece) -> Tensor | Quantised:
    sizes = zip(piece.part, piece.shape, strict=True)
    part = stored.read(files, *(slice(*cut.indices(size)[:2]) for cut, size in sizes))
    if len(stored.tensors) > 1 and not (part.scales if isinstance(part, Quantised) else part).isfinite().all():
        raise UserError(f"{files.folder}: {', '.join(stored.tensors)}: scales are not all finite numbers")
    return part


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


def problems_of(
    files: CheckpointFiles, stored: dict[str, Stored], scheme: Scheme, ignored: frozenset[str]
) -> list[tuple[str, list[str]]]:
    """What is wrong, by the files' headers, and the names of all that it is wrong with; the likeliest cause first."""
    there, needed = files.place.keys(), {name for weight in stored.values() for name in weight.tensors}
    wrong, missing, otherwise = [], [], []
    for name, weight in stored.items():
        module, absent = name.removesuffix(".weight"), []
        for tensor, need in weight.tensors.items():
            if tensor not in there:
                absent += [] if need.optional else [tensor]
                continue
            shape, kind = files.header(tensor)
            if shape != need.shape:
                wrong.append(f"{tensor} has shape {list(shape)}, expected {list(need.shape)}")
            if kind not in need.types:
                wrong.append(f"{tensor} has type {kind}, expected one of {', '.join(need.types)}")
        signs = [(f"{module}.{sign}", whose) for sign, whose in SIGNS.items()]
        strange = [f"{sign}, {whose}" for sign, whose in signs if sign in there and sign not in weight.tensors]
        if absent and name in there and name not in weight.tensors:
            strange.append(f"{name}, unquantised")
        otherwise += strange
        missing += absent
    problems = [
        (f"weights that are not stored as the config says ({scheme.title})", sorted(otherwise)),
        ("tensors missing", sorted(missing)),
        ("tensors that the model does not know", sorted(there - needed - ignored)),
        ("tensors that do not fit", wrong),
    ]
    return [(problem, names) for problem, names in problems if names]
