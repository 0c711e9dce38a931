"""Sizes of layers that several families have, as their configs give them. Importing them needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexSizes:
    """An index by which each query chooses the blocks of tokens that it attends to."""

    heads: int  # of the index's queries
    width: int  # of its keys, which all heads share
    ratio: int  # tokens of a block
    top: int  # most blocks that a query attends to, beside the tokens behind the last complete one


@dataclass(frozen=True)
class NgramSizes:
    """A table of rows that the last tokens choose, and what is read from it."""

    size: int  # tokens of the longest n-gram
    heads: int  # rows that each length reads
    width: int  # of all rows of a token together
    least: int  # rows of a head, which has the next prime number of them that no head before it has
    multiple: int  # that the number of all rows is rounded up to
    parts: int  # of the table in a checkpoint
    taps: int  # of the convolution, which is dilated by `size`
    seed: int
    end: int  # the token that ends a text
    vocabulary: int
