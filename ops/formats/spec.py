"""The facts that make up a storage format of matrices. Each quantised format is one file of this folder, which holds
its `FormatSpec`.

The launcher reads these facts and must start quickly, so no file that holds a spec imports torch at its top.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

GROUP_SIZES = (32, 64, 128)  # columns of a row that may share a scale: the sizes of a quantisation group
LARGEST_GROUP = 256  # of formats whose scales have scales


@dataclass(frozen=True)
class BlockType:
    """One of ggml's block types, which a GGUF file stores rows in: `nbytes` bytes hold `columns` neighbours of a row.
    `ops/cpu/csrc/kernels/blocks.cpp` reads them."""

    name: str  # ggml's, as its number is
    number: int
    columns: int
    nbytes: int


@dataclass(frozen=True)
class Nesting:
    """Scales that have scales: `columns` neighbours share a byte, which a float16 of their group multiplies. With
    `minimums`, 32 columns also share a byte of a second kind with a float16 of its own, which is subtracted. With
    `of_rows` the bytes are e4m3 floats, and a float32 of each row multiplies them."""

    columns: int
    minimums: bool = False
    of_rows: bool = False

    @property
    def group_bytes(self) -> int:
        return 0 if self.of_rows else 4 if self.minimums else 2

    @property
    def row_bytes(self) -> int:
        return 4 * self.of_rows

    @property
    def block_bytes(self) -> int:
        """Bytes for each 32 columns of a row."""
        return 32 // self.columns + self.minimums


@dataclass(frozen=True)
class BitRecord:
    """All that is kept of 32 columns of a row beside halves: so many words of 32 bits, and bytes."""

    words: int
    bytes: int
    grid: str = ""  # ggml's name of the type whose grid its numbers are of

    @property
    def nbytes(self) -> int:
        return 4 * self.words + self.bytes


@dataclass(frozen=True)
class FormatSpec:
    """The facts of a format that no reader, layer or device has to know by the format's name. Its row of
    `ops/cpu/csrc/kernels/formats.h`, which has the same name, says how kernels multiply it."""

    name: str  # the one spelling, also of cases
    bits: int  # of a weight
    group: int = 0  # columns that share a scale, unless a matrix has other groups; 0: floats without scales
    scale_type: str = "float16"  # torch's name of the type of a group's scale
    middle: int = 0  # the zero point of every level, unless a matrix has zero points of its own
    codes: tuple[float, ...] = ()  # what each level stands for, if levels are no numbers themselves
    nesting: Nesting | None = None
    record: BitRecord | None = None  # in place of levels and bytes of scales
    zero_points: bool = False  # whether a matrix may have zero points of its own
    float_levels: bool = False
    # Whether activations are rounded to eight bits: by products of the CPU, for each 32 columns; by devices with
    # products of integers, for each token.
    int8_products: bool = True
    int8_inputs: bool = False
    block_types: tuple[BlockType, ...] = ()  # those of a GGUF file that become this format
    # Rounds floats (m, K) to levels with a scale for every `group` columns; None: csrc/kernels/pack.cpp does so.
    quantise: "Callable[[Tensor, int], Any] | None" = None
    method: str = ""  # the `quantization.method` of a case that keeps a checkpoint in this format, if not its name
    rounded_again: str = ""  # what is lost where its weights become q4, for a message; empty: little

    @property
    def quantised(self) -> bool:
        return self.group > 0

    def quant_bytes(self, weights: int) -> int:
        """Returns the bytes of so many weights, besides scales that lie apart from them."""
        return weights // 32 * self.record.nbytes if self.record else weights * self.bits // 8


SPECS: dict[str, FormatSpec] = {}  # by name: filled by `umbra.ops.formats`


@dataclass(frozen=True)
class Format:
    """The storage of a matrix: a format by its name, `group` columns of a row that share a scale (0: floats without
    scales), and zero points where `zeros`. With `tiled` the device may store a float matrix in its own tile order
    (Ascend's FRACTAL_NZ). For experts: the format of all three matrices, or of gate and up if `down` has its own."""

    kind: str
    group: int = 0
    zeros: bool = False
    tiled: bool = False
    down: "Format | None" = None

    @property
    def spec(self) -> FormatSpec:
        return SPECS[self.kind]

    @property
    def quantised(self) -> bool:
        return self.group > 0
