"""The meaning of the ops that read and write residual streams, as reference.py has that of the others."""

import torch
import torch.nn.functional as F
from torch import Tensor

from umbra.ops.interface import SinkhornWeights


def spread(x: Tensor, streams: int) -> Tensor:
    return x.repeat(1, streams)


def stream_norm(streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    by_stream = streams.float().unflatten(1, weight.shape)  # (T, S, H)
    scale = torch.rsqrt(by_stream.square().mean(-1, keepdim=True) + eps)
    return (by_stream * scale * weight.float()).flatten(1).to(streams.dtype)


def scaled_silu(x: Tensor, factor: float) -> Tensor:
    return F.silu(x.float() * factor).to(x.dtype)


def gated_read(gates: Tensor, normed: Tensor, streams: int) -> Tensor:
    gated = gates.float().sigmoid() * normed.float()
    return gated.unflatten(1, (streams, -1)).mean(1).to(normed.dtype)


def gated_write(streams: Tensor, y: Tensor, logits: Tensor) -> Tensor:
    weights = 2 * (logits.float() / logits.shape[1]).sigmoid()  # (T, S)
    return streams.copy_(streams.float() + (weights[:, :, None] * y.float()[:, None]).flatten(1))


def sinkhorn_read(streams: Tensor, weights: SinkhornWeights) -> tuple[Tensor, Tensor, Tensor]:
    x, count, margin = streams.float(), weights.count, weights.margin
    products = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + weights.eps)) @ weights.fn.float().T
    scales = weights.scale.float().repeat_interleave(torch.tensor([count, count, count * count], device=x.device))
    pre, post, comb = (products * scales + weights.base.float()).split([count, count, count * count], 1)
    comb = comb.unflatten(1, (count, count)).softmax(-1) + margin
    comb = comb / (comb.sum(-2, keepdim=True) + margin)
    for _ in range(weights.steps - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + margin)
        comb = comb / (comb.sum(-2, keepdim=True) + margin)
    read = ((pre.sigmoid() + margin)[:, :, None] * x.unflatten(1, (count, -1))).sum(1)
    return read.to(streams.dtype), 2 * post.sigmoid(), comb


def sinkhorn_write(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("tjk,tjh->tkh", comb, streams.float().unflatten(1, (comb.shape[1], -1)))
    return streams.copy_((mixed + post[:, :, None] * y.float()[:, None]).flatten(1))
