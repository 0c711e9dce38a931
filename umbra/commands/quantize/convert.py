"""Writes the quantised checkpoint layer by layer, so that a run that was killed can be resumed.

Every file is written under a temporary name and then renamed, so a file that exists is complete. The index and
config.json are written last: a folder without them does not load. During calibration each layer's input is the output
of the *original* layers before it, so a resumed run recomputes the layers that are already written and produces the
same bytes. Memory holds one or two weights of the source for each core, one layer as it is written and, with
calibration, the hidden states of its tokens and the attention's weights of one layer in float32.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from umbra.base.errors import UserError
from umbra.base.files import read_json, write_json, write_whole
from umbra.commands.quantize.awq import AwqTarget
from umbra.commands.quantize.layer import CalibratedLayer
from umbra.commands.quantize.search import Fold, fold, search_layer
from umbra.commands.quantize.source import CheckpointSource
from umbra.commands.quantize.target import Target
from umbra.commands.quantize.workers import LayerProgress, ParallelMap, workers
from umbra.models.tokenizers import tokenizer_in

STATE = "quantize_state.json"
WINDOW = 256  # tokens of calibration text that attend to each other


@dataclass(frozen=True)
class Calibration:
    path: Path
    tokens: int  # most tokens, from the beginning of the text, that are used


@torch.inference_mode()
def convert(out: Path, target: Target, calibration: Calibration | None = None) -> None:
    """Write the target's source to the folder `out`.

    Weights are rounded to the nearest step. With calibration, which only AWQ has, they are scaled first (search.py).
    """
    target.check()
    source = target.source
    text = _read_text(calibration.path) if calibration else ""
    state: dict[str, Any] = {"quantization": target.quantisation, "source": source.digest()}
    if calibration:
        state |= {"calibrate": hashlib.sha256(text.encode()).hexdigest(), "tokens": calibration.tokens}
    _begin(out, state)
    for path in source.companions:
        _copy(path, out / path.name)
    depth = len(source.parts)
    *layers, rest = (out / target.file(number, depth) for number in range(depth + 1))
    missing = [index for index, path in enumerate(layers) if not path.is_file()]
    hidden = _embedded(source, _token_ids(source, text, calibration)) if calibration and missing else None
    count = missing[-1] + 1 if missing else 0
    with LayerProgress(count) as progress, workers(progress) as parallel_map:
        for index in range(count):
            folds: list[Fold] = []
            if hidden is not None and source.parts[index] != source.mtp:
                windows, length, _ = hidden.shape
                layer = CalibratedLayer(source, index, windows, length, parallel_map)
                weights = partial(_wide, source.layer(index))
                if index in missing and isinstance(target, AwqTarget):
                    rounded = partial(_rounded, target, index)
                    folds = list(search_layer(layer, weights, hidden, target.group, rounded))
                hidden = layer.forward(weights, hidden)
            if index in missing:
                _write_tensors(layers[index], _written(target, index, folds, parallel_map))
            progress.layer()
    if not rest.is_file():
        _write_tensors(rest, source.rest())
    _finish(target, out, [*layers, rest])


def _begin(out: Path, state: dict[str, Any]) -> None:
    """Create the folder, or check that it was begun with the same state."""
    if (out / STATE).is_file():
        before = read_json(out / STATE)
        differ = sorted(key for key in before.keys() | state.keys() if before.get(key) != state.get(key))
        if differ:
            raise UserError(f"--out {out}: was begun with another {', '.join(differ)}: use the same, or remove it")
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = [path.name for path in out.iterdir() if path.name != f"{STATE}.tmp"]
    except OSError as error:
        raise UserError(f"--out {out}: cannot be created: {error.strerror}") from None
    if others:
        raise UserError(f"--out {out}: holds files, but no {STATE}: give a new folder")
    write_json(out / STATE, state)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--calibrate {path}: not readable: {error}") from None


def _token_ids(source: CheckpointSource, text: str, calibration: Calibration) -> Tensor:
    """(B, L): windows of equal length; tokens that do not fill the last window are left out."""
    ids = tokenizer_in(source.folder).encode(text, chat=False)[: calibration.tokens]
    if len(ids) < 2:
        raise UserError(f"--calibrate {calibration.path}: fewer than two tokens")
    if max(ids) >= source.config.vocab_size:
        raise UserError(
            f"{source.folder}: its tokenizer gives {max(ids)}, outside vocab_size {source.config.vocab_size}"
        )
    length = min(WINDOW, len(ids), source.config.max_positions)
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def _embedded(source: CheckpointSource, ids: Tensor) -> Tensor:
    """The tokens' rows of the embedding table, (B, L, H) float32."""
    return source.read("model.embed_tokens.weight")[ids].float()


def _wide(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    return tensors[name].float()


def _rounded(target: Target, index: int, name: str) -> bool:
    """Returns whether the weight `name` of layer `index` is quantised."""
    return target.quantised(f"model.layers.{index}.{name}".removesuffix(".weight"))


def _written(target: Target, index: int, folds: list[Fold], parallel_map: ParallelMap) -> dict[str, Tensor]:
    """The tensors of one layer as they are written to the checkpoint."""
    layer, parts_by_name = target.source.layer(index), dict[str, list[Tensor]]()

    def written(named: tuple[str, Tensor]) -> dict[str, Tensor]:
        full = f"{target.source.parts[index]}.{named[0]}"
        module = full.removesuffix(".weight")
        if target.quantised(module):
            return target.tensors(module, named[1])
        stored = named[1].to(target.source.float_type(full))
        return {full: stored.mT.contiguous() if full in target.source.fused else stored}

    for tensors in parallel_map(written, fold(layer, folds) if folds else layer.parts()):
        for name, part in tensors.items():
            parts_by_name.setdefault(name, []).append(part)
    return {name: torch.cat(parts) if parts[1:] else parts[0] for name, parts in parts_by_name.items()}


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod((path.parent / STATE).stat().st_mode)  # safetensors makes the file readable by its owner only
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error}") from None


def _copy(path: Path, to: Path) -> None:
    data = path.read_bytes()
    write_whole(to, lambda file: file.write(data))


def _finish(target: Target, out: Path, paths: list[Path]) -> None:
    """Write the index and, last, config.json, which make the folder a checkpoint."""
    file_of: dict[str, str] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            file_of |= dict.fromkeys(file.keys(), path.name)
    total = sum(path.stat().st_size for path in paths)
    write_json(out / target.index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))})
    for name, record in target.records(target.source.config_json, file_of).items():
        write_json(out / name, record)
