"""Streams this rank's shards of a safetensors checkpoint into a model, and proves that nothing is missing or left over.

The proof comes first, from the files' headers: every tensor is wanted or ignorable, every wanted tensor is present with
the right shape and type, and the pieces cover every parameter. Only then is data read, one weight at a time, through
memory maps: peak memory is what the rank keeps plus one weight.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from umbra.base.errors import UserError, listed
from umbra.base.progress import progress as showing
from umbra.executor.checkpoint.files import TensorFiles
from umbra.executor.checkpoint.formats.scheme import Scheme, Stored, by_input, plain
from umbra.executor.checkpoint.gguf_files import open_files
from umbra.models.layers.base import Piece, Separate, layers_of
from umbra.ops.formats.ggml import Blocks
from umbra.ops.formats.quantised import Quantised
from umbra.ops.formats.rows import Alternating

SIGNS = {  # endings of tensor names that only one format uses
    "weight_packed": "compressed-tensors' pack-quantized",
    "weight_scale": "compressed-tensors' int-quantized or float-quantized, or modelslim's",
    "weight_scale_2": "modelopt's NVFP4",
    "qweight": "AWQ's or GPTQ's",
    "g_idx": "GPTQ's",
    "weight_scale_inv": "block-scaled FP8's",
}
UNREAD = "scales of activations are not used: activations are rounded with scales of their own"
CONTRADICTION = "modules are not stored as the config says; they are read as the files store them"
# Of a KV cache in FP8 or int8 (C8), which is no part of the weights.
KV_SCALES = (".k_scale", ".v_scale", ".kv_cache_scale", ".kv_cache_offset")
INPUT_SCALES = (".input_scale", ".input_global_scale")  # of activations, which are rounded by themselves

Ignores = Callable[[str], bool]  # whether the model does not use the tensor of this name, although it may be there


def load_checkpoint(model: nn.Module, folder: Path, scheme: Scheme, ignores: Ignores, progress: bool) -> int:
    """Fills every weight of `model`; returns the number of bytes read. Values that are not finite are a warning that
    names their tensors."""
    wanted, files = wanted_by(model), open_files(folder, scheme)
    stored = {name: stored_as(pieces, scheme) for name, pieces in wanted.items()}
    for problem, names in problems_of(files, stored, scheme, ignores):
        raise UserError(f"{files.folder}: {len(names)} {problem}: {listed(names)}")
    if odd := contradictions(wanted, scheme):
        print(f"warning: {files.folder}: {len(odd)} {CONTRADICTION}: {listed(odd)}")
    needed = {tensor for weight in stored.values() for tensor in weight.tensors}
    if unread := sorted(name for name in files.file_of if name.endswith(INPUT_SCALES) and name not in needed):
        print(f"{files.folder}: {len(unread)} {UNREAD}: {listed(unread)}")
    strange: list[str] = []  # tensors with values that are not finite
    mine = {name: sum(p.kept_elements for p in pieces) / prod(pieces[0].shape) for name, pieces in wanted.items()}
    total = sum(share * files.nbytes(tensor) for name, share in mine.items() for tensor in stored[name].tensors)
    with showing("loading weights", total, "B", progress) as bar:
        # In the order of the files, by the first tensor of each weight.
        for name in sorted(wanted, key=lambda name: str(files.file_of.get(next(iter(stored[name].tensors))))):
            for piece in wanted[name]:
                if piece.fill is not None:
                    part = _part(files, stored[name], piece)
                    try:
                        finite = piece.fill(part)
                    except UserError as error:
                        raise UserError(f"{files.folder}: {name}: {error}") from None
                    if finite if isinstance(finite, bool) else _finite(part):
                        continue
                    if any(isinstance(half, Blocks) for half in halves_of(part)):
                        raise not_finite(files, stored[name])
                    if name not in strange:
                        strange.append(name)
            files.relieve()
            bar.reach(files.read)
    if strange:
        print(f"warning: {files.folder}: {len(strange)} tensors hold NaN or infinite values: {listed(strange)}")
    return files.read


def attach_mapped(model: nn.Module, folder: Path, scheme: Scheme) -> None:
    """Gives the layers that keep their pieces in mapped files theirs, of a model that is filled otherwise."""
    pieces = [piece for path, layer in layers_of(model) if layer.mapped for piece in layer.pieces(path)]
    files = open_files(folder, scheme) if pieces else None
    for piece in pieces:
        if files and piece.fill:
            piece.fill(_part(files, plain(piece.name, piece.shape), piece))


def wanted_by(model: nn.Module) -> dict[str, list[Piece]]:
    """The pieces of the model that each weight of its checkpoint fills, by the weight's name; a tied weight has two."""
    wanted: dict[str, list[Piece]] = {}
    elsewhere = tuple(f"{path}." for path, part in model.named_modules() if path and isinstance(part, Separate))
    for path, layer in layers_of(model):
        if path.startswith(elsewhere):
            continue
        pieces = list(layer.pieces(path))
        if sum(p.kept_elements for p in pieces) != layer.elements:
            raise AssertionError(f"the pieces of {path} do not fill it exactly")  # a bug in the layer
        for piece in pieces:
            wanted.setdefault(piece.name, []).append(piece)
    return wanted


def linear_modules(wanted: dict[str, list[Piece]]) -> list[str]:
    return [name.removesuffix(".weight") for name, pieces in wanted.items() if pieces[0].linear]


def stored_as(pieces: list[Piece], scheme: Scheme) -> Stored:
    """Returns the storage of the weight that `pieces` are parts of."""
    first = pieces[0]
    module = first.name.removesuffix(".weight")
    if stored := scheme.weight(first.name, first.shape, first.linear):
        return stored
    if first.linear and (encoding := scheme.encoding(module)):
        if len(first.shape) == 2:
            return encoding.stored(module, *first.shape)
        return encoding.stacked(module, *first.shape)
    return by_input(first.name, *first.shape) if first.by_input else plain(first.name, first.shape)


def contradictions(wanted: dict[str, list[Piece]], scheme: Scheme) -> list[str]:
    """The modules that the files store otherwise than the config says. Routers in floats are none: many configs do not
    mention them."""
    modules = {name.removesuffix(".weight"): pieces[0] for name, pieces in wanted.items() if pieces[0].linear}
    odd = {module: piece for module, piece in modules.items() if scheme.contradicts(module)}
    return sorted(module for module, piece in odd.items() if not piece.router or scheme.encoding(module))


def _scales_are_finite(part: Tensor | Quantised, stored: Stored) -> bool:
    """Returns whether all scales are finite. Block scales were checked when the blocks were read."""
    if isinstance(part, Quantised):
        return isinstance(part, Blocks) or part.finite
    return len(stored.tensors) == 1 or _finite(part)


def _part(files: TensorFiles, stored: Stored, piece: Piece) -> Tensor | Quantised | Alternating:
    sizes = zip(piece.part, piece.shape, strict=True)
    part = stored.read(files, *(slice(*cut.indices(size)[:2]) for cut, size in sizes))
    if not all(_scales_are_finite(half, stored) for half in halves_of(part)):
        raise not_finite(files, stored)
    return part


def not_finite(files: TensorFiles, stored: Stored) -> UserError:
    return UserError(f"{files.folder}: {', '.join(stored.tensors)}: scales are not all finite numbers")


def halves_of(part: Tensor | Quantised | Alternating) -> Sequence[Tensor | Quantised]:
    return part if isinstance(part, Alternating) else [part]


def _finite(part: Tensor | Quantised | Alternating) -> bool:
    """Returns whether no value is NaN or infinite. The sum shows that in one pass, unless it overflows by itself."""
    if isinstance(part, Alternating):
        return all(map(_finite, part))
    if isinstance(part, Blocks):
        return part.finite
    if isinstance(part, Quantised):  # the scales were checked; of the levels, only floats can be strange
        return not part.spec.float_levels or bool((part.plain_levels.view(torch.uint8) & 0x7F != 0x7F).all())
    return bool(part.sum(dtype=torch.float32).isfinite()) or bool(part.isfinite().all())


def ignorable(names: Iterable[str], ignores: Ignores) -> set[str]:
    """Returns the tensors that a checkpoint may hold although no weight is read from them: what the model ignores, the
    rotary frequencies that older tools wrote, which the config determines, and scales of the KV cache and of
    activations."""
    endings = ".rotary_emb.inv_freq", *KV_SCALES, *INPUT_SCALES
    return {name for name in names if ignores(name) or name.endswith(endings)}


def problems_of(
    files: TensorFiles, stored: dict[str, Stored], scheme: Scheme, ignores: Ignores
) -> list[tuple[str, list[str]]]:
    """(problem, names of the tensors or modules that have it) for everything that the files' headers show to be wrong,
    the likeliest cause first; and biases that should be zeros."""
    there, needed = files.file_of.keys(), {name for weight in stored.values() for name in weight.tensors}
    read = {name for weight in stored.values() for name, need in weight.tensors.items() if not need.zeros}
    unknown, wrong, missing, otherwise = there - needed - ignorable(there, ignores), [], [], []
    for name, weight in stored.items():
        module, absent = name.removesuffix(".weight"), []
        for tensor, need in weight.tensors.items():
            if tensor not in there:
                absent += [] if need.optional else [tensor]
                continue
            shape, kind = files.header(tensor)
            if not need.fits(shape):
                wrong.append(f"{tensor} has shape {list(shape)}, expected {list(need.shape)}")
            if kind not in need.types:
                wrong.append(f"{tensor} has type {kind}, expected one of {', '.join(need.types)}")
            fits = need.fits(shape) and kind in need.types
            if fits and need.zeros and tensor not in read and files(tensor, slice(None)).any():
                unknown.add(tensor)
        signs = [(f"{module}.{sign}", whose) for sign, whose in SIGNS.items()]
        strange = [f"{sign}, {whose}" for sign, whose in signs if sign in there and sign not in weight.tensors]
        if absent and name in there and name not in weight.tensors:
            strange.append(f"{name}, unquantised")
        otherwise += strange
        missing += absent
    problems = [
        (f"weights that are not stored as the config says ({scheme.title})", sorted(otherwise)),
        ("tensors missing", sorted(missing)),
        ("tensors that the model does not know", sorted(unknown)),
        ("tensors that do not fit", wrong),
    ]
    return [(problem, names) for problem, names in problems if names]
