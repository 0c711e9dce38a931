"""The ops that read and write residual streams, computed by csrc/kernels/streams.cpp."""

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops.cpu.engine import native, pointer, strided
from umbra.ops.interface import SinkhornWeights


def spread(x: Tensor, streams: int) -> Tensor:
    tokens, hidden = x.shape
    out = torch.empty(tokens, streams * hidden)
    native.spread(pointer(x), pointer(out), tokens, hidden, streams)
    return out


def stream_norm(streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    count, hidden = weight.shape
    out = torch.empty(streams.shape)
    native.stream_norm(pointer(streams), pointer(weight), pointer(out), len(streams), hidden, count, eps)
    return out


def scaled_silu(x: Tensor, factor: float) -> Tensor:
    tokens, width = x.shape
    out = torch.empty(x.shape)
    native.scaled_silu(strided(x[:, None]), pointer(out), tokens, width, x.stride(0), factor)
    return out


def gated_read(gates: Tensor, normed: Tensor, streams: int) -> Tensor:
    tokens, hidden = len(normed), normed.shape[1] // streams
    out = torch.empty(tokens, hidden)
    native.gated_read(pointer(gates), pointer(normed), pointer(out), tokens, hidden, streams)
    return out


def gated_write(streams: Tensor, y: Tensor, logits: Tensor) -> Tensor:
    tokens, hidden = y.shape
    count, stride = logits.shape[1], logits.stride(0)
    native.gated_write(pointer(streams), pointer(y), strided(logits[:, None]), tokens, hidden, count, stride)
    return streams


def sinkhorn_read(streams: Tensor, weights: SinkhornWeights) -> tuple[Tensor, Tensor, Tensor]:
    count, tokens = weights.count, len(streams)
    if count > native.most_streams:
        raise UserError(f"hc_mult: {count} is above {native.most_streams}, the most streams of the cpu's mixing")
    hidden = streams.shape[1] // count
    out, post, comb = torch.empty(tokens, hidden), torch.empty(tokens, count), torch.empty(tokens, count, count)
    native.sinkhorn_read(
        pointer(streams),
        pointer(weights.fn),
        pointer(weights.scale),
        pointer(weights.base),
        pointer(out),
        pointer(post),
        pointer(comb),
        tokens,
        hidden,
        count,
        weights.steps,
        weights.eps,
        weights.margin,
    )
    return out, post, comb


def sinkhorn_write(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    tokens, hidden = y.shape
    native.sinkhorn_write(pointer(streams), pointer(y), pointer(post), pointer(comb), tokens, hidden, comb.shape[1])
    return streams
