"""Formats of GGUF with two to three and a half bits, whose weights are kept as records, which have all that is of 32
columns of a row but d, and dmin (ops/cpu/csrc/kernels/records.h).

iq2, iq3, iq1  numbers of entries in a grid of 8 or 4 columns, w = d * scale * entry, with a sign for each column; in
               iq1 with an eighth more or less for 8 columns
q2_k, q3_k     levels, w = d * scale * level - dmin * minimum, and w = d * scale * (level - 4)
tq2_0          levels, w = d * (level - 1)
"""

from functools import cache
from typing import TYPE_CHECKING

from umbra.base.errors import UserError
from umbra.ops.formats.spec import BitRecord, BlockType, FormatSpec, Nesting

if TYPE_CHECKING:
    from torch import Tensor


def _kept(bits: int, record: BitRecord, *types: BlockType, minimums: bool = False) -> FormatSpec:
    name = types[0].name.lower()
    return FormatSpec(name, bits, group=256, nesting=Nesting(16, minimums), block_types=types, record=record)


IQ2_XXS = _kept(2, BitRecord(2, 0, "IQ2_XXS"), BlockType("IQ2_XXS", 16, 256, 66))
IQ2_XS = _kept(2, BitRecord(2, 1, "IQ2_XS"), BlockType("IQ2_XS", 17, 256, 74))
IQ2_S = _kept(2, BitRecord(2, 2, "IQ2_S"), BlockType("IQ2_S", 22, 256, 82))
IQ3_XXS = _kept(3, BitRecord(3, 0, "IQ3_XXS"), BlockType("IQ3_XXS", 18, 256, 98))
IQ3_S = _kept(3, BitRecord(3, 2, "IQ3_S"), BlockType("IQ3_S", 21, 256, 110))
IQ1_S = _kept(1, BitRecord(1, 2, "IQ1_S"), BlockType("IQ1_S", 19, 256, 50))
IQ1_M = _kept(1, BitRecord(1, 3, "IQ1_S"), BlockType("IQ1_M", 29, 256, 56))
Q2_K = _kept(2, BitRecord(2, 2), BlockType("Q2_K", 10, 256, 84), minimums=True)
Q3_K = _kept(3, BitRecord(3, 2), BlockType("Q3_K", 11, 256, 110))
TQ2_0 = _kept(2, BitRecord(2, 0), BlockType("TQ2_0", 35, 256, 66), BlockType("TQ1_0", 34, 256, 54))


@cache
def grid_of(name: str) -> "Tensor":
    """Returns the entries of the grid of this type of ggml's, int8 (entries, columns), those of IQ1 in eighths."""
    import torch

    try:
        from gguf import quants
    except ImportError:
        raise UserError(f"{name}: its grid is in the package gguf: python -m pip install gguf==0.19.0") from None
    type = getattr(quants, name)
    type.init_grid()
    grid = torch.from_numpy(type.grid)[0, 0]
    return (grid * 8 if name.startswith("IQ1") else grid).to(torch.int8)
