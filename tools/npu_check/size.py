"""The sizes of a model's layer on one die, for the stages that check operators."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    name: str
    hidden: int
    inner: int  # of an expert
    experts: int
    heads: int
    kv_heads: int
    head_dim: int
    top_k: int


SMALL = Size("small", 128, 64, 8, 4, 2, 64, 2)
WHOLE = Size("30B", 2048, 768, 128, 32, 4, 128, 8)
EIGHTH = Size("30B over 8", 2048, 96, 128, 4, 1, 128, 8)
SIZES = (SMALL, EIGHTH, WHOLE)  # the smallest first
