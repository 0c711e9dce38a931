"""Gated DeltaNet (arXiv 2412.06464): linear attention, whose past is a state of one size. In `ChannelDeltaNet` (arXiv
2510.26692) each channel of the keys has a decay of its own."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.attention import kv_shard
from umbra.models.layers.base import ALL, Layer, Piece
from umbra.models.layers.linear import MergedLinear, RowLinear, Source, grouped
from umbra.models.layers.norm import RMSNorm
from umbra.models.layers.states import RecurrentStates
from umbra.ops.interface import fixed

ShardedDim = tuple[int, slice]  # elements of a dimension, and this rank's range of them


class DeltaNetConfig(Protocol):
    """The part of a family's config that the mixer reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def linear_num_key_heads(self) -> int: ...
    @property
    def linear_num_value_heads(self) -> int: ...
    @property
    def linear_key_head_dim(self) -> int: ...
    @property
    def linear_value_head_dim(self) -> int: ...
    @property
    def linear_conv_kernel_dim(self) -> int: ...


class ChannelDeltaConfig(Protocol):
    """The part of a family's config that the mixer with decays of channels reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def linear_num_heads(self) -> int: ...
    @property
    def linear_head_dim(self) -> int: ...
    @property
    def linear_conv_kernel_dim(self) -> int: ...


class DeltaNet(nn.Module):
    """A convolution of queries, keys and values, the gated delta rule, and a gated norm of each value head. Heads are
    split over the ranks that share attention, each key head with its value heads; if there are more ranks than key
    heads, neighbouring ranks hold copies of the same one. `fused`: the checkpoint has one projection for queries, keys,
    values and gates, and one for the rest, each with a group of rows for each key head; GGUF files have the gates apart
    and no such groups. `sigmoid`: of the gate, in place of silu."""

    def __init__(self, config: DeltaNetConfig, build: Build, fused: bool, sigmoid: bool = False):
        super().__init__()
        tp, hidden = build.parallel.attn_tp, config.hidden_size
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        width, depth = config.linear_value_head_dim, config.linear_key_head_dim
        rows = key_heads * depth, value_heads * width
        keys: ShardedDim = rows[0], kv_shard(tp, key_heads).part(rows[0])
        values: ShardedDim = rows[1], tp.part(rows[1])
        heads: ShardedDim = value_heads, tp.part(value_heads)
        if fused and not build.stored.holds(build.at("in_proj_qkv").path):
            qkvz = grouped("in_proj_qkvz", [keys, keys, values, values], key_heads)
        else:
            qkvz = grouped("in_proj_qkv", [keys, keys, values]) + grouped("in_proj_z", [values])
        if fused:
            ba = grouped("in_proj_ba", [heads, heads], key_heads)
        else:
            ba = grouped("in_proj_b", [heads]) + grouped("in_proj_a", [heads])
        self.ops, self.parallel, self.width, self.sigmoid = build.ops, build.parallel, width, sigmoid
        self.qkvz_proj = MergedLinear(build, hidden, [source for part in qkvz for source in part])
        self.ba_proj = MergedLinear(build, hidden, [source for part in ba for source in part], small=True)
        self.conv1d = Convolution(build, config.linear_conv_kernel_dim, {"conv1d": [keys, keys, values]})
        self.decay = Decay(build, heads)
        self.norm = RMSNorm(build, width, config.rms_norm_eps, base=0.0)
        self.out_proj = RowLinear(build, "out_proj", rows[1], hidden)
        taps, channels = self.conv1d.weight.shape
        sizes = len(self.decay.rates), depth, width
        self.states = RecurrentStates(taps, channels, sizes, len(self.decay.dt_bias), build.drafts.tokens)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        x = batch.rows(self.parallel).gather(x)
        qkvz, (b, a) = self.qkvz_proj.of_all_rows(x), self.ba_proj.of_all_rows(x).chunk(2, 1)
        channels, places = self.conv1d.weight.shape[1], self.states.places(batch)
        qkv, z = qkvz.split([channels, qkvz.shape[1] - channels], 1)
        qkv = self.ops.causal_conv(qkv, self.conv1d.weight, self.states.conv, places)
        y = self.ops.gated_delta_rule(
            qkv, a, b, self.decay.rates, self.decay.dt_bias, self.states.delta, self.states.inputs, places
        )
        z = z.unflatten(1, (-1, self.width))
        y = self.ops.gated_rms_norm(y, z, self.norm.weight, self.norm.eps, self.sigmoid)
        return self.out_proj(y.flatten(1), batch)


class ChannelDeltaNet(nn.Module):
    """The delta rule whose states decay by channels of the keys, between a convolution of queries, keys and values and
    a norm of each head that a sigmoid gates. Decays and gates come of two matrices each, between which there are
    `linear_head_dim` columns. Heads are split over the ranks that share attention. `lowest` is of the op."""

    def __init__(self, config: ChannelDeltaConfig, build: Build, lowest: float = 0.0):
        super().__init__()
        tp, hidden, width = build.parallel.attn_tp, config.hidden_size, config.linear_head_dim
        heads: ShardedDim = config.linear_num_heads, tp.part(config.linear_num_heads)
        rows: ShardedDim = heads[0] * width, tp.part(heads[0] * width)
        narrow: ShardedDim = width, slice(0, width)

        def product(name: str, inputs: int, outputs: ShardedDim, small: bool) -> MergedLinear:
            return MergedLinear(build, inputs, [Source(name, *outputs)], small=small, floats=not small)

        self.ops, self.parallel, self.width, self.lowest = build.ops, build.parallel, width, lowest
        self.in_proj = MergedLinear(build, hidden, [Source(f"{which}_proj", *rows) for which in "qkv"])
        self.f_a_proj, self.f_b_proj = product("f_a_proj", hidden, narrow, True), product("f_b_proj", width, rows, True)
        self.b_proj = product("b_proj", hidden, heads, True)
        self.g_a_proj = product("g_a_proj", hidden, narrow, False)
        self.g_b_proj = product("g_b_proj", width, rows, False)
        convolved = {f"{which}_conv1d": [rows] for which in "qkv"}
        self.conv1d = Convolution(build, config.linear_conv_kernel_dim, convolved)
        self.decay = Decay(build, heads, width)
        self.o_norm = RMSNorm(build, width, config.rms_norm_eps, base=0.0)
        self.o_proj = RowLinear(build, "o_proj", rows[0], hidden)
        taps, channels = self.conv1d.weight.shape
        sizes = len(self.decay.rates), width, width
        self.states = RecurrentStates(taps, channels, sizes, len(self.decay.dt_bias), build.drafts.tokens)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        x, places, decay = batch.rows(self.parallel).gather(x), self.states.places(batch), self.decay
        a, b = self.f_b_proj.of_all_rows(self.f_a_proj.of_all_rows(x)), self.b_proj.of_all_rows(x)
        gate = self.g_b_proj.of_all_rows(self.g_a_proj.of_all_rows(x))
        qkv = self.ops.causal_conv(self.in_proj.of_all_rows(x), self.conv1d.weight, self.states.conv, places)
        states = self.states.delta, self.states.inputs, places, self.lowest
        y = self.ops.gated_delta_rule(qkv, a, b, decay.rates, decay.dt_bias, *states)
        gate, norm = gate.unflatten(1, (-1, self.width)), self.o_norm
        return self.o_proj(self.ops.gated_rms_norm(y, gate, norm.weight, norm.eps, sigmoid=True).flatten(1), batch)


class Convolution(Layer):
    """The weights (taps, channels) of a convolution of each channel over the rows of a sequence. The channels are those
    of `tensors`, one below the other: by the name of each in the checkpoint, its parts. With a `dilation` the
    checkpoint's taps lie so many rows apart, and those between are zeros."""

    def __init__(self, build: Build, taps: int, tensors: Mapping[str, list[ShardedDim]], dilation: int = 1):
        super().__init__()
        self.tensors, self.taps, self.dilation = tensors, taps, dilation
        channels = sum(kept.stop - kept.start for parts in tensors.values() for _, kept in parts)
        self.weight = fixed(torch.zeros((taps - 1) * dilation + 1, channels, device=build.device))
        self.elements, self.nbytes = taps * channels, self.weight.nbytes

    def pieces(self, path: str) -> Iterator[Piece]:
        def fill(to: slice, part: Tensor) -> None:
            self.weight[:: self.dilation, to] = part[:, 0].T

        above, row = path.rpartition(".")[0], 0
        for name, parts in self.tensors.items():
            shape, first = (sum(rows for rows, _ in parts), 1, self.taps), 0
            for rows, kept in parts:
                end = row + kept.stop - kept.start
                cut = slice(first + kept.start, first + kept.stop), ALL, ALL
                yield Piece(f"{above}.{name}.weight", shape, cut, partial(fill, slice(row, end)), spread=0.5)
                first, row = first + rows, end


class Decay(Layer):
    """For each value head the rate of its state's decay, of which the checkpoint has the logarithm, and what is added
    to the time that passes with a token: one number, or one of each of `channels` of its keys. The checkpoint then has
    the logarithms as (1, 1, heads, 1)."""

    def __init__(self, build: Build, heads: ShardedDim, channels: int = 0):
        super().__init__()
        (self.heads, self.part), self.channels = heads, channels
        count, numbers = self.part.stop - self.part.start, channels or 1
        self.rates, self.dt_bias = (fixed(torch.empty(n, device=build.device)) for n in (count, count * numbers))
        self.elements, self.nbytes = count * (1 + numbers), self.rates.nbytes + self.dt_bias.nbytes

    def pieces(self, path: str) -> Iterator[Piece]:
        at, numbers = path.rpartition(".")[0], self.channels or 1
        shape: tuple[int, ...] = (self.heads,)
        part: tuple[slice, ...] = (self.part,)
        if self.channels:
            shape, part = (1, 1, self.heads, 1), (ALL, ALL, self.part, ALL)

        def fill(logarithms: Tensor) -> None:
            self.rates.copy_(logarithms.float().exp().flatten())

        # Random states lose from a thousandth to a half of what they hold with a token.
        yield Piece(f"{at}.A_log", shape, part, fill, mean=-3.5, spread=1.5)
        kept = slice(self.part.start * numbers, self.part.stop * numbers)
        yield Piece(f"{at}.dt_bias", (self.heads * numbers,), (kept,), self.dt_bias.copy_)
