"""AWQ in AutoAWQ's "gemm" layout: packed along the outputs in a special order, always with zero points.

qweight int32 (K, N / 8), qzeros int32 (K / group, N / 8), scales (K / group, N); w = (level - zero) * scale
"""

from umbra.executor.checkpoint.formats.bitpack import covering, groups_of
from umbra.executor.checkpoint.formats.patterns import inside
from umbra.executor.checkpoint.formats.scheme import Encoding, Fetch, Needed, Ruled, Stored, check_sizes
from umbra.models.hf_config import HfConfig
from umbra.ops.formats import GROUP_SIZES, Format
from umbra.ops.formats.q4 import Q4
from umbra.ops.formats.quantised import Quantised
from umbra.ops.words import Words

NIBBLES = 8
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # output j of eight is the nibble ORDER[j]


class Awq(Ruled):
    def __init__(self, config: HfConfig):
        config.refuse("version", "gemm", "GEMM")
        config.refuse("w_bit", 4)
        config.refuse("zero_point", True)
        super().__init__(AwqMatrix(config), [(inside(config.names("modules_to_not_convert")), None)])


class AwqMatrix(Encoding):
    bits, zeros, signs = 4, True, ("qweight",)

    def __init__(self, config: HfConfig):
        config.refuse("bits", 4)
        self.group = config.one_of("group_size", "q_group_size", allowed=GROUP_SIZES)
        self.title = f"AWQ, 4 bits in groups of {self.group} with zero points"
        self.format = Format(Q4.name, self.group, zeros=True)

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        check_sizes(module, ("columns", columns, "group_size", self.group), ("rows", rows, "a word's", NIBBLES))
        qweight, qzeros, scales = (f"{module}.{kind}" for kind in ("qweight", "qzeros", "scales"))
        groups, words = columns // self.group, rows // NIBBLES

        def read(fetch: Fetch, outputs: slice, inputs: slice) -> Quantised:
            held, within = covering(outputs, NIBBLES)
            in_groups, cut = groups_of(inputs, self.group)
            return Quantised(
                Q4,
                levels=Words(fetch(qweight, inputs, held).T, 4, ORDER).rows(within),
                scales=cut(fetch(scales, in_groups, outputs).T),
                zeros=cut(Words(fetch(qzeros, in_groups, held).T, 4, ORDER).rows(within)),
            )

        tensors = {
            qweight: Needed((columns, words), ("I32",)),
            qzeros: Needed((groups, words), ("I32",)),
            scales: Needed((groups, rows)),
        }
        return Stored(tensors, read)
