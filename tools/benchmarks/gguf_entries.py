"""The tensors of a loaded model by llama.cpp's names, which the record of its family has, for gguf_file.py.

Rows are in the checkpoint's order, because llama.cpp rotates the columns that the checkpoint does; but for the value
heads of linear attention that are tiled.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from umbra.models.causal_lm import CausalLM
from umbra.models.config import ModelConfig
from umbra.models.family import Family
from umbra.models.gguf.architecture import Architecture
from umbra.models.gguf.names import ROPE_DIVISORS, Names, Tiled
from umbra.models.layers.attention import Sinks
from umbra.models.layers.delta_net import ChannelDeltaNet, DeltaNet
from umbra.models.layers.experts import Experts
from umbra.models.layers.latent_attention import LatentAttention
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.norm import RMSNorm, SplitRMSNorm
from umbra.models.layers.router import Router, SelectionBias
from umbra.models.registry import families
from umbra.ops.cpu.matrix import ROWS

Order = tuple[int, ...] | None  # of rows in a head (models/layers/rotary.py); None: as in the checkpoint
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Entry:
    """A tensor of the file; `read` yields its matrix, or those of all experts, in float32 or its own type."""

    name: str
    shape: tuple[int, ...]
    format: str
    read: Callable[[], Iterator[Tensor]]


def as_in_checkpoint(rows: Tensor, order: Order) -> Tensor:
    """`rows`, or the elements of a vector, of which each head's are in `order`, as in the checkpoint."""
    if order is None:
        return rows
    return rows.unflatten(0, (-1, len(order)))[:, torch.tensor(order).argsort()].flatten(0, 1)


def plain(name: str, weight: Tensor, order: Order = None) -> Entry:
    format = str(weight.dtype).removeprefix("torch.")
    return Entry(name, tuple(weight.shape), format, lambda: iter([as_in_checkpoint(weight, order)]))


def matrix(name: str, weight: Any, *parts: slice, change: Change | None = None, format: str | None = None) -> Entry:
    """The rows of a NativeMatrix, or these parts of them one below the other, after a `change` of their order."""
    parts = parts or (slice(0, weight.rows),)

    def read() -> Iterator[Tensor]:
        rows = torch.cat([weight.packed.dequantised(0, part.stop - part.start, part.start) for part in parts])
        yield change(rows) if change else rows

    count = sum(part.stop - part.start for part in parts)
    return Entry(name, (count, weight.columns), format or weight.packed.format.kind, read)


def heads(name: str, of: Any) -> Entry:
    """Each head's matrix."""
    shape = of.count, of.rows, of.columns
    return Entry(
        name, shape, of.packed.format.kind, lambda: (of.packed.dequantised(h, of.rows) for h in range(of.count))
    )


def experts(name: str, weights: Any, which: str) -> Entry:
    rows, columns = (weights.hidden, weights.inner) if which == "down" else (weights.inner, weights.hidden)
    shape = weights.count, rows, columns
    kind = weights.w13.format.kind
    return Entry(name, shape, kind, lambda: (weights.dequantised(e, which) for e in range(weights.count)))


def biases(name: str, weights: Any, which: str) -> Entry:
    (of_all,) = (weights.w2 if which == "down" else weights.w13).biases  # on one NUMA node
    bias = of_all[:, : weights.hidden]
    if which != "down":  # sixteen rows of gate, sixteen of up, in turn
        bias = of_all.view(weights.count, -1, 2, ROWS)[:, :, int(which == "up")].flatten(1)
    return plain(name, bias.contiguous())


def architecture_of(config: ModelConfig) -> Architecture:
    """Returns the architecture of the files of the family that has the class of `config`."""
    path = f"{type(config).__module__}:{type(config).__name__}"
    record: Family = next(record for record in families() if record.config == path)
    if record.gguf is None:
        raise ValueError(f"{record.name} has no GGUF files")
    return record.gguf


def entries(model: CausalLM, config: ModelConfig) -> Iterator[Entry]:
    """Yields every tensor by llama.cpp's name, matrices in the format that they are kept in."""
    table: Any = model.model.embed_tokens.table
    names = architecture_of(config).names
    yield plain("token_embd.weight", table)
    yield plain("output_norm.weight", model.model.norm.weight)
    own: Any = config
    if own.rope.llama3 or own.rope.divisors:
        pairs = zip(own.rope.plain_frequencies, own.rope.inverse_frequencies(), strict=True)
        yield plain(ROPE_DIVISORS, torch.tensor([before / after for before, after in pairs]))
    yield matrix("output.weight", model.lm_head.weight)
    for i, layer in enumerate(model.model.layers):
        for path, module in layer.named_modules():
            for entry in of_module(path, module, names, config):
                yield replace(entry, name=f"blk.{i}.{entry.name}")


def of_module(path: str, module: Any, names: Names, config: ModelConfig) -> Iterator[Entry]:
    """Yields the tensors of one module of a decoder layer, without those of its own modules."""
    named = names.written
    if isinstance(module, RMSNorm):
        yield plain(f"{named[path]}.weight", module.weight, module.source.order)
    elif isinstance(module, SplitRMSNorm):
        for source, weight in zip(module.sources, module.weights, strict=True):
            at = f"{path.rpartition('.')[0]}.{source.name}"
            yield plain(f"{named[at]}.weight", weight, source.order)
    elif isinstance(module, Sinks | SelectionBias):
        yield plain(named[path], module.values)
    elif isinstance(module, Router):
        gate = matrix(f"{named[path]}.weight", module.weight, format="float32")  # llama.cpp accepts no other type
        yield replace(gate, shape=gate.shape[1:]) if gate.shape[0] == 1 else gate
        if module.score_bias is not None:
            yield plain(f"{named[path]}.bias", module.score_bias)
    elif isinstance(module, Experts):
        for which in ("gate", "up", "down"):
            yield experts(f"ffn_{which}_exps.weight", module.weights, which)
            if module.kind.biased:
                yield biases(f"ffn_{which}_exps.bias", module.weights, which)
    elif isinstance(module, GatedMLP):
        both: Any = module.gate_up_proj.weight
        yield matrix(f"{named[f'{path}.gate_proj']}.weight", both, slice(0, both.rows // 2))
        yield matrix(f"{named[f'{path}.up_proj']}.weight", both, slice(both.rows // 2, both.rows))
        yield matrix(f"{named[f'{path}.down_proj']}.weight", module.down_proj.weight)
    elif isinstance(module, LatentAttention):
        yield from latent_attention(module)
    elif isinstance(module, DeltaNet):
        yield from delta_net(module, names, config)
    elif isinstance(module, ChannelDeltaNet):
        yield from channel_delta_net(module)
    elif hasattr(module, "qkv_proj"):
        yield from attention(module, names)


def attention(layer: Any, names: Names) -> Iterator[Entry]:
    """Yields the projections of grouped-query attention."""
    both, start, order = layer.qkv_proj.weight, 0, layer.qkv_proj.sources[0].order
    gates = slice(sum(layer.sizes), both.rows)

    def in_file(rows: Tensor) -> Tensor:
        """The rows of queries or keys, or the elements of their bias."""
        rows = as_in_checkpoint(rows, order)
        if not names.paired:
            return rows
        return rows.unflatten(0, (-1, 2, layer.head_dim // 2)).transpose(1, 2).flatten(0, 2)

    for name, rows in zip("qkv", layer.sizes, strict=True):
        part, change = slice(start, start + rows), None if name == "v" else in_file
        if name == "q" and gates.start < gates.stop:
            beside = partial(with_gates, order=order, dim=layer.head_dim)
            yield matrix("attn_q.weight", both, part, gates, change=beside)
        else:
            yield matrix(f"attn_{name}.weight", both, part, change=change)
        if layer.qkv_proj.bias is not None:
            bias = layer.qkv_proj.bias[part]
            yield plain(f"attn_{name}.bias", change(bias) if change else bias)
        start += rows
    yield matrix("attn_output.weight", layer.o_proj.weight)
    if layer.o_proj.bias is not None:
        yield plain("attn_output.bias", layer.o_proj.bias)


def latent_attention(layer: Any) -> Iterator[Entry]:
    """Yields the projections of attention over latents."""
    (first, both_rows), latent = layer.sizes, layer.kv_b_proj.latent
    both, queries = layer.qkv_proj.weight, layer.q_b_proj.weight if layer.compressed else layer.qkv_proj.weight
    order = layer.qkv_proj.sources[-1].order

    def of_heads(rows: Tensor) -> Tensor:
        """Each head's rows before those of it that rotate."""
        still, turned = rows.split(layer.of_queries)
        heads = still, as_in_checkpoint(turned, order)
        return torch.cat([part.unflatten(0, (layer.kv_b_proj.heads, -1)) for part in heads], 1).flatten(0, 1)

    name = "attn_q_b" if layer.compressed else "attn_q"
    yield matrix(f"{name}.weight", queries, slice(0, sum(layer.of_queries)), change=of_heads)
    if layer.compressed:
        yield matrix("attn_q_a.weight", both, slice(0, first))

    def of_latents(rows: Tensor) -> Tensor:
        return torch.cat((rows[:latent], as_in_checkpoint(rows[latent:], order)))

    yield matrix("attn_kv_a_mqa.weight", both, slice(first, first + both_rows), change=of_latents)
    yield heads("attn_k_b.weight", layer.kv_b_proj.keys)
    yield heads("attn_v_b.weight", layer.kv_b_proj.values)
    yield matrix("attn_output.weight", layer.o_proj.weight)


def with_gates(rows: Tensor, order: Order, dim: int) -> Tensor:
    """Each head's rows of queries before those of its gate."""
    queries, gates = rows.chunk(2)
    heads = as_in_checkpoint(queries, order).unflatten(0, (-1, dim)), gates.unflatten(0, (-1, dim))
    return torch.stack(heads, 1).flatten(0, 2)


def delta_net(layer: Any, names: Names, config: Any) -> Iterator[Entry]:
    """Yields the tensors of linear attention except its norm."""
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    keys, width = 2 * key_heads * config.linear_key_head_dim, config.linear_value_head_dim
    qkvz, ba = layer.qkvz_proj.weight, layer.ba_proj.weight
    channels = keys + heads * width

    def in_file(rows: Tensor, size: int = 1, first: int = 0) -> Tensor:
        """The rows with value heads of so many, behind `first` others, in llama.cpp's order."""
        order = Tiled(key_heads, heads, size, first).order()
        return rows[torch.tensor(order).argsort()] if names.tiled else rows

    def in_groups(rows: Tensor) -> Tensor:
        """The rows b and a of each key head's value heads."""
        return torch.cat([part.unflatten(0, (key_heads, -1)) for part in rows.chunk(2)], 1).flatten(0, 1)

    yield matrix("attn_qkv.weight", qkvz, slice(0, channels), change=partial(in_file, size=width, first=keys))
    yield matrix("attn_gate.weight", qkvz, slice(channels, qkvz.rows), change=partial(in_file, size=width))
    if names.tiled:
        yield matrix("ssm_beta.weight", ba, slice(0, heads), change=in_file)
        yield matrix("ssm_alpha.weight", ba, slice(heads, 2 * heads), change=in_file)
    else:
        yield matrix("ssm_ba.weight", ba, change=in_groups)
    yield plain("ssm_conv1d.weight", in_file(layer.conv1d.weight.T, width, keys))
    yield plain("ssm_a", in_file(-layer.decay.rates))
    yield plain("ssm_dt.bias", in_file(layer.decay.dt_bias))
    yield matrix("ssm_out.weight", layer.out_proj.weight, change=lambda rows: in_file(rows.T, width).T)


def channel_delta_net(layer: Any) -> Iterator[Entry]:
    """Yields the tensors of linear attention with decays of channels, except its norm."""
    count, width = len(layer.decay.rates), layer.width
    for i, which in enumerate("qkv"):
        part = slice(i * count * width, (i + 1) * count * width)
        yield matrix(f"attn_{which}.weight", layer.in_proj.weight, part)
        yield plain(f"ssm_conv1d_{which}.weight", layer.conv1d.weight.T[part][None, :, None].contiguous())
    for name in ("f_a", "f_b", "g_a", "g_b"):
        yield matrix(f"ssm_{name}.weight", getattr(layer, f"{name}_proj").weight)
    yield matrix("ssm_beta.weight", layer.b_proj.weight)
    yield plain("ssm_a", -layer.decay.rates[None, None, :, None])
    yield plain("ssm_dt.bias", layer.decay.dt_bias)
    yield matrix("attn_output.weight", layer.o_proj.weight)
