"""compressed-tensors: pack-quantized and int-quantized.

pack-quantized  weight_packed int32 (N, ceil(K bits / 32)), weight_shape int64 (2), weight_scale (N, K / group) and,
                with zero points, weight_zero_point int32 (ceil(N bits / 32), K / group), packed along N
int-quantized   weight int8 (N, K), weight_scale (N, K / group), weight_zero_point int8 (N, K / group)

w = (level - zero) * scale. Levels and zero points are signed; packed ones are stored with 2^(bits - 1) added.
"""

import torch
from torch import Tensor

from errors import UserError
from executor.checkpoint.formats.bitpack import covering, groups_of, unpack
from executor.checkpoint.formats.patterns import target
from executor.checkpoint.formats.scheme import Fetch, Needed, Scheme, Stored, check_sizes, in_words, kept_as
from models.hf_config import HfConfig
from ops.format import GROUP_SIZES, Quantised


class CompressedTensors(Scheme):
    def __init__(self, config: HfConfig):
        self.packed = config.one_of("format", allowed=("pack-quantized", "int-quantized")) == "pack-quantized"
        config.refuse("kv_cache_scheme")
        groups = config.inner("config_groups")
        if len(groups.data) != 1:
            raise config.error("config_groups", "must be one group: mixed formats are not implemented")
        group = groups.inner(next(iter(groups.data)))
        weights = group.inner("weights")
        self.bits = weights.one_of("num_bits", allowed=(4, 8) if self.packed else (8,))
        weights.refuse("type", "int")
        weights.refuse("actorder", "weight", "static", False)
        self.zeros = not weights.flag("symmetric", True)
        self.group = -1
        if weights.one_of("strategy", allowed=("group", "channel")) == "group":
            self.group = weights.one_of("group_size", allowed=GROUP_SIZES)
        self.targets = [target(text, group.where) for text in group.names("targets")]
        self.ignored = [target(text, config.where) for text in config.names("ignore")]
        words = in_words(self.bits, self.group, self.zeros)
        self.title = f"compressed-tensors {config.value('format')}, {words}"
        self.format = kept_as(self.bits, self.group, self.zeros)

    def quantised(self, module: str) -> bool:
        return any(t(module) for t in self.targets) and not any(t(module) for t in self.ignored)

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        group = self.group if self.group > 0 else columns
        check_sizes(module, ("columns", columns, "group_size", group))
        scale, zero_point = f"{module}.weight_scale", f"{module}.weight_zero_point"
        groups, count = columns // group, 32 // self.bits
        weight, shape = f"{module}.weight_packed" if self.packed else f"{module}.weight", f"{module}.weight_shape"
        middle = 1 << (self.bits - 1)

        def signed(x: Tensor) -> Tensor:
            return (x.to(torch.int16) + middle).to(torch.uint8)

        def levels(fetch: Fetch, outputs: slice, inputs: slice) -> Tensor:
            if not self.packed:
                return signed(fetch(weight, outputs, inputs))
            if (said := fetch(shape, slice(0, 2)).tolist()) != [rows, columns]:
                raise UserError(f"{shape}: {said} is not the module's [{rows}, {columns}]")
            held, within = covering(inputs, count)
            return unpack(fetch(weight, outputs, held), self.bits).flatten(-2)[:, within].contiguous()

        def zeros(fetch: Fetch, outputs: slice, in_groups: slice) -> Tensor:
            """(outputs, groups)"""
            if not self.packed:
                return signed(fetch(zero_point, outputs, in_groups))
            held, within = covering(outputs, count)
            packed = unpack(fetch(zero_point, held, in_groups), self.bits)  # (words, groups, count)
            return packed.transpose(1, 2).flatten(0, 1)[within]

        def read(fetch: Fetch, outputs: slice, inputs: slice) -> Quantised:
            in_groups, cut = groups_of(inputs, group)
            return Quantised(
                bits=self.bits,
                levels=levels(fetch, outputs, inputs),
                scales=cut(fetch(scale, outputs, in_groups)),
                zeros=cut(zeros(fetch, outputs, in_groups)) if self.zeros else None,
            )

        tensors = {scale: Needed((rows, groups))}
        if self.packed:
            tensors |= {weight: Needed((rows, -(-columns // count)), ("I32",)), shape: Needed((2,), ("I64", "I32"))}
        else:
            tensors[weight] = Needed((rows, columns), ("I8",))
        if self.zeros:
            packed_zeros = Needed((-(-rows // count), groups), ("I32",))
            tensors[zero_point] = packed_zeros if self.packed else Needed((rows, groups), ("I8",))
        return Stored(tensors, read)
