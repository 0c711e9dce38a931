"""Rows of a table that are chosen by the last tokens (n-grams), read into all residual streams before a layer.

The table is many times larger than the rest of a model, and a token reads a few rows of it. It is not copied: its parts
stay where the checkpoint's files are mapped, and the system keeps in memory what is read. The host looks rows up, from
the tokens before each that `Batch.previous` has. The rows' values, gated by how their keys agree with the streams, pass
a convolution over the tokens, whose last inputs are a state of the sequence.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from umbra.base.errors import UserError
from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layer_sizes import NgramSizes
from umbra.models.layers.base import ALL, Layer, Piece
from umbra.models.layers.delta_net import Convolution
from umbra.models.layers.linear import MergedLinear, Source
from umbra.models.layers.states import ConvolutionStates
from umbra.models.layers.streams import Carried, StreamNorm
from umbra.ops.interface import NgramTable

MASK = (1 << 64) - 1
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64
PER_LAYER = 10007
TYPES = torch.float32, torch.bfloat16, torch.float16


def multipliers(sizes: NgramSizes, number: int) -> list[int]:
    """Returns the factor of each token in the hashes of the layer `number` of those with a table."""
    bound = max(1, ((1 << 63) - 1) // max(sizes.vocabulary, 1) // 2)
    factors = []
    for i in range(1, sizes.size + 1):
        value = (sizes.seed + PER_LAYER * number + GAMMA * (i + 1)) & MASK
        value = ((value ^ (value >> 30)) * FIRST) & MASK
        value = ((value ^ (value >> 27)) * SECOND) & MASK
        factors.append(2 * ((value ^ (value >> 31)) % bound) + 1)
    return factors


def moduli(sizes: NgramSizes, number: int) -> list[int]:
    """Returns the rows of each head of the layer `number` of those with a table."""
    heads, primes, value = (sizes.size - 1) * sizes.heads, list[int](), sizes.least - 1
    while len(primes) < (number + 1) * heads:
        value += 1
        if value > 1 and all(value % divisor for divisor in range(2, int(value**0.5) + 1)):
            primes.append(value)
    return primes[number * heads :]


class HostTable(Layer):
    """The rows of a table, in the parts that the checkpoint has, where its files are mapped."""

    mapped = True

    def __init__(self, build: Build, sizes: NgramSizes, number: int):
        super().__init__()
        own, width = moduli(sizes, number), sizes.width // ((sizes.size - 1) * sizes.heads)
        offsets = [sum(own[:head]) for head in range(len(own))]
        rows = -(-sum(own) // sizes.multiple) * sizes.multiple
        self.whole = build.stored.holds(build.path)
        parts = 1 if self.whole else sizes.parts
        if rows % parts:
            raise UserError(f"split_ngram_parts: {parts} does not divide {rows}, the rows of the table of n-grams")
        self.shape, self.elements, self.nbytes = (rows // parts, width), rows * width, 0
        factors, sizes_of_heads, starts = (
            torch.tensor(values) for values in (multipliers(sizes, number), own, offsets)
        )
        none, addresses = torch.empty(self.shape, device="meta"), torch.zeros(parts, dtype=torch.int64)
        self.table = NgramTable(factors, sizes_of_heads, starts, sizes.end, [none] * parts, addresses)

    def pieces(self, path: str) -> Iterator[Piece]:
        for number in range(len(self.table.parts)):
            name = f"{path}.weight" if self.whole else f"{path}.shard_{number}.weight"
            yield Piece(name, self.shape, (ALL, ALL), partial(self._attach, number))

    def _attach(self, number: int, part: Tensor) -> bool:
        """Keeps the part where it is. Its values are not looked at, which would read all of it."""
        if part.dtype not in TYPES or (number and part.dtype != self.table.parts[0].dtype):
            raise UserError(f"a table of n-grams in {part.dtype} is not read, only one of float32, bfloat16 or float16")
        self.table.parts[number] = part.contiguous()
        self.table.addresses[number] = self.table.parts[number].data_ptr()
        return True


class NgramLayer(nn.Module):
    """The layer `number` of those with a table, over `streams` residual streams."""

    def __init__(self, build: Build, hidden: int, eps: float, streams: int, sizes: NgramSizes, number: int):
        super().__init__()
        if not build.ops.selects:
            raise UserError("model_path: tables of n-grams are only read on the cpu as yet")
        self.ops, self.parallel, self.streams, wide = build.ops, build.parallel, streams, streams * hidden
        self.previous = sizes.size - 1  # tokens before each that `Batch.previous` has
        embedding = nn.Module()
        embedding.ngram_embedding = HostTable(build.at("ple_embedding.ngram_embedding"), sizes, number)
        self.ple_embedding = embedding
        self.key_proj, self.value_proj = (
            MergedLinear(build, sizes.width, [Source(name, rows, slice(0, rows))], floats=True)
            for name, rows in (("key_proj", wide), ("value_proj", hidden))
        )
        self.norm_key, self.norm_query, self.norm_conv = (
            StreamNorm(build.at(name), streams, hidden, eps) for name in ("norm_key", "norm_query", "norm_conv")
        )
        self.conv1d = Convolution(build, sizes.taps, {"conv1d": [(wide, slice(0, wide))]}, sizes.size)
        taps, channels = self.conv1d.weight.shape
        self.states = ConvolutionStates(taps, channels, build.drafts.tokens)
        self.table = embedding.ngram_embedding.table

    def forward(self, carried: Carried, batch: Batch) -> Carried:
        if batch.previous is None:
            raise AssertionError("the step lacks the tokens before its own")
        rows, (own,) = batch.rows(self.parallel), carried
        embedded = self.ops.ngram_rows(batch.token_ids, batch.previous, self.table)
        keys = self.norm_key(self.key_proj.of_all_rows(embedded))
        queries = self.norm_query(rows.gather(own))
        values = self.value_proj.of_all_rows(embedded)
        added = self.ops.agreeing_values(keys, queries, values, self.streams)
        near = self.ops.causal_conv(
            self.norm_conv(added), self.conv1d.weight, self.states.conv, self.states.places(batch)
        )
        return (self.ops.add_gated(own, rows.own(self.ops.add_gated(added, near, None)), None),)
