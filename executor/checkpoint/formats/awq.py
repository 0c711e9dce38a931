"""AWQ in AutoAWQ's "gemm" layout: packed along the outputs in a special order, always with zero points.

qweight int32 (K, N / 8), qzeros int32 (K / group, N / 8), scales (K / group, N); w = (level - zero) * scale
"""

import torch
from torch import Tensor

from executor.checkpoint.formats.bitpack import covering, groups_of
from executor.checkpoint.formats.patterns import inside
from executor.checkpoint.formats.scheme import Encoding, Fetch, Needed, Scheme, Stored, check_sizes
from models.hf_config import HfConfig
from ops.format import GROUP_SIZES, Format, Quantised

NIBBLES = 8
ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # output j of eight is the nibble ORDER[j]


def unpacked(words: Tensor) -> Tensor:
    """(a, n) int32 -> (8 n, a) uint8"""
    turned = words.T.clone(memory_format=torch.contiguous_format)
    bytes_ = turned.view(torch.uint8).unflatten(-1, (-1, 4))  # (n, a, 4), the lowest bits first
    out = torch.empty(words.shape[1], NIBBLES, words.shape[0], dtype=torch.uint8)
    for output, nibble in enumerate(ORDER):
        pair = bytes_[..., nibble // 2]
        torch.bitwise_and(pair >> 4 if nibble % 2 else pair, 15, out=out[:, output])
    return out.flatten(0, 1)


class Awq(Scheme, Encoding):
    bits, zeros, signs = 4, True, ("qweight",)

    def __init__(self, config: HfConfig):
        config.refuse("version", "gemm", "GEMM")
        config.refuse("bits", 4)
        config.refuse("w_bit", 4)
        config.refuse("zero_point", True)
        self.group = config.one_of("group_size", "q_group_size", allowed=GROUP_SIZES)
        self.excluded = inside(config.names("modules_to_not_convert"))
        self.title = f"AWQ, 4 bits in groups of {self.group} with zero points"
        self.format, self.encodings = Format("q4", self.group, zeros=True), (self,)

    def said(self, module: str) -> Encoding | None:
        """Every module of the decoder is quantised, except those that `modules_to_not_convert` names."""
        return self if ".layers." in module and not self.excluded(module) else None

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        check_sizes(module, ("columns", columns, "group_size", self.group), ("rows", rows, "a word's", NIBBLES))
        qweight, qzeros, scales = (f"{module}.{kind}" for kind in ("qweight", "qzeros", "scales"))
        groups, words = columns // self.group, rows // NIBBLES

        def read(fetch: Fetch, outputs: slice, inputs: slice) -> Quantised:
            held, within = covering(outputs, NIBBLES)
            in_groups, cut = groups_of(inputs, self.group)

            return Quantised(
                bits=4,
                levels=unpacked(fetch(qweight, inputs, held))[within],
                scales=cut(fetch(scales, in_groups, outputs).T),
                zeros=cut(unpacked(fetch(qzeros, in_groups, held))[within]),
            )

        tensors = {
            qweight: Needed((columns, words), ("I32",)),
            qzeros: Needed((groups, words), ("I32",)),
            scales: Needed((groups, rows)),
        }
        return Stored(tensors, read)
