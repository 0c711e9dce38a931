"""modelslim's W8A8: a description gives the type of each tensor, and the config does not mention the quantisation.

W8A8_DYNAMIC  weight int8 (N, K), weight_scale (N, 1), weight_offset (N, 1) of zeros: w = weight * weight_scale; each
              activation row is rounded with its own scale
W8A8          weight, quant_bias int32 (N), input_scale and input_offset (1), deq_scale (N), which is float32 or has
              its bits in the lower half of an int64: y = (sum(weight * q) + quant_bias) * deq_scale, where
              q = round(x / input_scale + input_offset)
W8A8_MIX      all of these

Of the second, w = weight * deq_scale / input_scale, and y has the bias (quant_bias + input_offset * sum(weight)) *
deq_scale. Its activations are rounded as the first one's, more exactly.

Norms and modules may have biases that the model's family lacks: smoothing moves activations, and takes that back in
the next product. Before v1, norms also have them as module.weight and module.bias, and W8A8 has weight_scale.
"""

from pathlib import Path

import torch
from torch import Tensor

from umbra.base.errors import UserError, short
from umbra.base.files import read_json
from umbra.executor.checkpoint.formats.scheme import Encoding, Fetch, Needed, Scheme, Stored
from umbra.ops.formats import FORMATS
from umbra.ops.formats.quantised import Quantised
from umbra.ops.formats.w8a8 import W8A8

STATIC, DYNAMIC, FLOAT = ("W8A8", "W8A8_MIX"), ("W8A8_DYNAMIC",), ("FLOAT",)
CACHE = ("C8",)  # scales of a KV cache in int8, which ours does not need
READ = (*FLOAT, *STATIC, *DYNAMIC, *CACHE)
ALL = slice(None)
ROUNDING = 2.0**-22  # of sums that modelslim adds in float32


class Int8(Encoding):
    format, bits, group, zeros = FORMATS[W8A8.name], 8, -1, False

    def __init__(self, static: bool):
        self.static = static
        self.signs = ("weight", "deq_scale" if static else "weight_scale")
        self.title = "W8A8, one scale for activations" if static else "W8A8, activations scaled by token"

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        weight, scale, offset = (f"{module}.{last}" for last in ("weight", "weight_scale", "weight_offset"))

        def read(fetch: Fetch, outputs: slice, inputs: slice) -> Quantised:
            if scale in fetch:
                scales = fetch(scale, outputs, ALL).float()
            else:
                scales = (_deq_scale(fetch, module, outputs) / fetch(f"{module}.input_scale", ALL).float())[:, None]
            if self.static and ".experts." in module and _bias(fetch, module, outputs).any():
                raise UserError(f"{module}: experts with biases are not read: quantise them as {DYNAMIC[0]}")
            return Quantised(W8A8, fetch(weight, outputs, inputs), scales, None)

        tensors = {
            weight: Needed((rows, columns), ("I8",)),
            scale: Needed((rows, 1), optional=self.static),
            offset: Needed((rows, 1), optional=True, zeros=True),
        }
        return Stored(tensors | _bias_of(module, rows) | (_static(module, rows) if self.static else {}), read)


def _static(module: str, rows: int) -> dict[str, Needed]:
    return {
        f"{module}.deq_scale": Needed((rows,), ("F32", "I64")),
        f"{module}.quant_bias": Needed((rows,), ("I32",)),
        f"{module}.input_scale": Needed((1,)),
        f"{module}.input_offset": Needed((1,)),
    }


def _bias_of(module: str, rows: int) -> dict[str, Needed]:
    """A bias that adds nothing, unless the model has it as a weight."""
    return {f"{module}.bias": Needed((rows,), optional=True, zeros=True)}


def _deq_scale(fetch: Fetch, module: str, outputs: slice) -> Tensor:
    stored = fetch(f"{module}.deq_scale", outputs)
    return stored.view(torch.int32)[::2].contiguous().view(torch.float32) if stored.dtype == torch.int64 else stored


def _bias(fetch: Fetch, module: str, outputs: slice) -> Tensor:
    """The bias of a module whose activations have one scale; zero where it is no more than roundings."""
    offset = fetch(f"{module}.input_offset", ALL).double()
    taken = offset * fetch(f"{module}.weight", outputs, ALL).sum(1)
    units = fetch(f"{module}.quant_bias", outputs) + taken
    units = torch.where(units.abs() <= 0.5 + taken.abs() * ROUNDING, 0, units)
    return (units * _deq_scale(fetch, module, outputs).double()).float()


class Modelslim(Scheme):
    def __init__(self, path: Path):
        self.path, self.types = path, _types(path)
        self.by_token, self.static = Int8(static=False), Int8(static=True)
        used = set(self.types.values())
        self.encodings = tuple(
            encoding
            for encoding, types in ((self.by_token, DYNAMIC), (self.static, STATIC))
            if used.intersection(types)
        )
        if not self.encodings:
            raise UserError(f"{path}: quantises no weight: give a checkpoint in {', '.join(STATIC + DYNAMIC)}")
        self.title = f"modelslim {', '.join(sorted(used.intersection(STATIC + DYNAMIC)))}"

    def said(self, *spellings: str) -> Encoding | None:
        names = (f"{module}.weight" for module in spellings)
        kind = next((self.types[name] for name in names if name in self.types), None)
        return self.by_token if kind in DYNAMIC else self.static if kind in STATIC else None

    def biased(self, path: str) -> bool:
        there = self.names or self.types
        return any(f"{path}.{last}" in there for last in ("bias", "module.bias", "quant_bias"))

    def weight(self, name: str, shape: tuple[int, ...], linear: bool) -> Stored | None:
        module, _, last = name.rpartition(".")
        encoding = self.encoding(module)
        if last not in ("weight", "bias") or (linear and encoding):
            return None
        if last == "bias" and encoding is self.static:
            tensors = _static(module, *shape) | {name: Needed(shape, optional=True)}  # quant_bias contains it
            return Stored(tensors, lambda fetch, outputs: _bias(fetch, module, outputs))
        copy = f"{module}.module.{last}"  # of a norm, before v1
        held = copy if copy in (self.names or ()) else name
        tensors = {given: Needed(shape, optional=True) for given in (held, name)}
        if last == "weight":
            tensors |= {held: Needed(shape)} | _bias_of(module, shape[0]) | _bias_of(f"{module}.module", shape[0])

        def read(fetch: Fetch, *part: slice) -> Tensor:
            if held in fetch:
                return fetch(held, *part)
            return torch.zeros([size.stop - size.start for size in part])  # a bias that only its neighbours have

        return Stored(tensors, read)


def _types(path: Path) -> dict[str, str]:
    """The type of each tensor that the description names; other keys are about the whole."""
    types = {name: kind for name, kind in read_json(path).items() if "." in name}
    for name, kind in types.items():
        if kind not in READ:
            raise UserError(f"{path}: {name:.200}: type {short(kind)} is not read, only {', '.join(READ)}")
        if name.endswith(".mul_scale"):
            raise UserError(f"{path}: {name:.200}: activations that are divided before a product are not read")
    return types
