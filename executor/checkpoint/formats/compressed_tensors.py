"""compressed-tensors: pack-quantized, int-quantized, float-quantized (fp8.py) and nvfp4-pack-quantized (nvfp4.py); or
several of them, each for a group of modules.

pack-quantized  weight_packed int32 (N, ceil(K bits / 32)), weight_shape int64 (2), weight_scale (N, K / group) and,
                with zero points, weight_zero_point int32 (ceil(N bits / 32), K / group), packed along N
int-quantized   weight int8 (N, K), weight_scale (N, K / group), weight_zero_point int8 (N, K / group)

w = (level - zero) * scale. Levels and zero points are signed; packed ones are stored with 2^(bits - 1) added. With
actorder "group", weight_g_idx int32 (K) has each input's group, as GPTQ's g_idx.
"""

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.executor.checkpoint.formats.bitpack import covering, groups_of, order_in
from umbra.executor.checkpoint.formats.fp8 import BLOCK, SHARING, Fp8Matrix
from umbra.executor.checkpoint.formats.nvfp4 import GROUP, Nvfp4Matrix
from umbra.executor.checkpoint.formats.patterns import target, vagueness
from umbra.executor.checkpoint.formats.scheme import (
    Encoding,
    Fetch,
    Needed,
    Scheme,
    Stored,
    check_sizes,
    in_words,
    kept_as,
)
from umbra.models.hf_config import HfConfig
from umbra.ops.formats import GROUP_SIZES, INTEGERS, Format
from umbra.ops.formats.quantised import Quantised
from umbra.ops.formats.w8a8 import W8A8
from umbra.ops.words import Words

NVFP4 = "nvfp4-pack-quantized"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", NVFP4)
MIXED = "mixed-precision"  # each group has a format of its own
MOST_GROUPS = 16


class CompressedTensors(Scheme):
    """Scales of the KV cache (`kv_cache_scheme`) do not change weights, so they are not read."""

    def __init__(self, config: HfConfig):
        config.one_of("format", allowed=(*FORMATS, MIXED))
        groups = config.inner("config_groups")
        if not 0 < len(groups.data) <= MOST_GROUPS:
            raise config.error("config_groups", f"must be one group or up to {MOST_GROUPS}")
        rules, encodings = [], []
        for name in groups.data:
            group = groups.inner(name)
            holder = group if group.value("format") else config
            inputs = group.inner("input_activations") if group.value("input_activations") else None
            encoding = _encoding(holder.one_of("format", allowed=FORMATS), group.inner("weights"), inputs)
            encodings.append(encoding)
            rules += [(vagueness(text), target(text, group.where), encoding) for text in group.names("targets")]
        self.encodings = tuple(encodings)
        self.rules = sorted(rules, key=lambda rule: rule[0])
        self.ignored = [target(text, config.where) for text in config.names("ignore")]
        self.title = f"compressed-tensors {', '.join(dict.fromkeys(e.title for e in encodings))}"

    def said(self, *spellings: str) -> Encoding | None:
        """Returns the encoding of the first group that names the module most exactly."""
        if any(matches(module) for matches in self.ignored for module in spellings):
            return None
        return next((encoding for _, matches, encoding in self.rules if any(map(matches, spellings))), None)


def _encoding(format: str, weights: HfConfig, inputs: HfConfig | None) -> Encoding:
    """Returns the encoding of a group of modules in `format`, which may say how `inputs` are rounded."""
    if format == NVFP4:
        weights.one_of("num_bits", allowed=(4,))
        weights.one_of("type", allowed=("float",))
        weights.one_of("group_size", allowed=(GROUP,))
        return Nvfp4Matrix(divided=True)
    if format != "float-quantized":
        return Integers(format, weights, inputs)
    weights.one_of("num_bits", allowed=(8,))
    weights.one_of("type", allowed=("float",))
    weights.refuse("symmetric", True)
    strategy = weights.one_of("strategy", allowed=tuple(SHARING))
    if strategy == "block" and weights.value("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise weights.error("block_structure", f"must be [{BLOCK}, {BLOCK}]")
    return Fp8Matrix("weight_scale", strategy)


class Integers(Encoding):
    def __init__(self, format: str, weights: HfConfig, inputs: HfConfig | None):
        self.packed = format == "pack-quantized"
        self.signs = ("weight_packed",) if self.packed else ("weight", "weight_scale")
        self.bits = weights.one_of("num_bits", allowed=(4, 8) if self.packed else (8,))
        weights.refuse("type", "int")
        weights.refuse("actorder", "weight", "static", "group", "dynamic", True, False)
        self.zeros = not weights.flag("symmetric", True)
        self.group = -1
        if weights.one_of("strategy", allowed=("group", "channel")) == "group":
            self.group = weights.one_of("group_size", allowed=GROUP_SIZES)
        self.ordered = weights.value("actorder") in ("group", "dynamic", True) and self.group > 0
        how = self.bits, self.group, self.zeros, self.ordered
        self.title, self.format = f"{format}, {in_words(*how)}", kept_as(*how)
        self.exact = not self.ordered or self.format is None
        in_int8 = inputs is not None and (inputs.value("num_bits"), inputs.value("type", default="int")) == (8, "int")
        self.int8_inputs = in_int8 and format == "int-quantized" and self.group < 0 and not self.zeros
        if self.int8_inputs:
            self.title, self.format = f"{self.title}, activations in 8 bits", Format(W8A8.name, W8A8.group)

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        group = self.group if self.group > 0 else columns
        check_sizes(module, ("columns", columns, "group_size", group))
        scale, zero_point = f"{module}.weight_scale", f"{module}.weight_zero_point"
        groups, count = columns // group, 32 // self.bits
        g_idx = f"{module}.weight_g_idx"
        weight, shape = f"{module}.weight_packed" if self.packed else f"{module}.weight", f"{module}.weight_shape"

        def levels(fetch: Fetch, outputs: slice, inputs: slice) -> Tensor | Words:
            if not self.packed:
                return fetch(weight, outputs, inputs)
            if (said := fetch(shape, slice(0, 2)).tolist()) != [rows, columns]:
                raise UserError(f"{shape}: {said} is not the module's [{rows}, {columns}]")
            held, within = covering(inputs, count)
            return Words(fetch(weight, outputs, held), self.bits).columns(within)

        def zeros(fetch: Fetch, outputs: slice, in_groups: slice) -> Tensor:
            """(outputs, groups)"""
            if not self.packed:
                return fetch(zero_point, outputs, in_groups).view(torch.uint8) ^ 128
            held, within = covering(outputs, count)
            return Words(fetch(zero_point, held, in_groups).T, self.bits).unpacked().T[within]

        def read(fetch: Fetch, outputs: slice, inputs: slice) -> Quantised:
            order = order_in(fetch, g_idx, group, self.ordered) if self.ordered else None
            in_groups, cut = groups_of(inputs, group, order)
            scales = fetch(scale, outputs, in_groups)
            if self.int8_inputs:  # of whole rows
                return Quantised(W8A8, fetch(weight, outputs, inputs), scales.float(), None)
            return Quantised(
                INTEGERS[self.bits],
                levels=levels(fetch, outputs, inputs),
                scales=cut(scales),
                zeros=cut(zeros(fetch, outputs, in_groups)) if self.zeros else None,
            )

        tensors = {scale: Needed((rows, groups))}
        if self.packed:
            tensors |= {weight: Needed((rows, -(-columns // count)), ("I32",)), shape: Needed((2,), ("I64", "I32"))}
        else:
            tensors[weight] = Needed((rows, columns), ("I8",))
        if self.ordered:
            tensors[g_idx] = Needed((columns,), ("I32", "I64"))
        if self.zeros:
            packed_zeros = Needed((-(-rows // count), groups), ("I32",))
            tensors[zero_point] = packed_zeros if self.packed else Needed((rows, groups), ("I8",))
        return Stored(tensors, read)
