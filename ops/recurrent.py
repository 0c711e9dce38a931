"""The meaning of the ops with states of gated DeltaNet layers, as reference.py has that of the others."""

import torch
import torch.nn.functional as F
from torch import Tensor

from umbra.ops.interface import Recurrent


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, recurrent: Recurrent) -> Tensor:
    out, taps = torch.zeros(x.shape, dtype=x.dtype, device=x.device), len(weight)
    for s in recurrent.sequences():
        before = torch.zeros_like(states[0]) if s.read < 0 else states[s.read]
        inputs = torch.cat((before[: taps - 1 + s.pending], x[s.start : s.end].float()))
        out[s.start : s.end] = F.silu((inputs[s.pending :].unfold(0, taps, 1) * weight.T).sum(-1)).to(x.dtype)
        if s.mark:
            kept = inputs[s.mark :][: taps - 1 if s.write >= 0 else states.shape[1]]
            states[s.marked][: len(kept)] = kept
        if s.write >= 0:
            states[s.write][: taps - 1] = inputs[len(inputs) - taps + 1 :]
    return out


def gated_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    inputs: Tensor,
    recurrent: Recurrent,
    lowest: float = 0.0,
) -> Tensor:
    _, heads, depth, width = states.shape
    keys = (qkv.shape[1] - heads * width) // 2
    q, k, v = qkv.float().split([keys, keys, heads * width], 1)
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).flatten(1)
        for x in (q.unflatten(1, (-1, depth)), k.unflatten(1, (-1, depth)))
    )
    passed, rate = a.float() + dt_bias, rates.repeat_interleave(a.shape[1] // heads)
    decay = (lowest * (rate * passed).sigmoid() if lowest else -rate * F.softplus(passed)).exp()
    new = torch.cat((k, v, decay, b.float().sigmoid()), 1)
    out = torch.zeros(len(qkv), heads, width, dtype=qkv.dtype, device=qkv.device)
    for s in recurrent.sequences():
        state = torch.zeros_like(states[0]) if s.read < 0 else states[s.read].clone()
        taken = torch.cat((inputs[max(s.read, 0)][: s.pending], new[s.start : s.end]))
        for number, row in enumerate(taken, 1):
            by_key, value, decays, betas = row.split([keys, heads * width, a.shape[1], heads])
            key, t = _of_heads(by_key, heads, depth), s.start + number - 1 - s.pending
            state = state * decays.view(heads, -1, 1)
            change = betas[:, None] * (value.view(heads, width) - torch.einsum("hkv,hk->hv", state, key))
            state = state + key[:, :, None] * change[:, None]
            if t >= s.start:
                query = _of_heads(q[t], heads, depth) * depth**-0.5
                out[t] = torch.einsum("hkv,hk->hv", state, query).to(qkv.dtype)
            if number == s.mark:
                states[s.marked] = state
        if s.write >= 0:
            states[s.write] = state
        elif s.mark:
            kept = taken[s.mark :][: inputs.shape[1]]
            inputs[s.marked][: len(kept)] = kept
    return out


def _of_heads(x: Tensor, heads: int, depth: int) -> Tensor:
    """x (Hk Dk): those of the key head of each value head. -> (Hv, Dk)"""
    return x.view(-1, depth).repeat_interleave(heads * depth // len(x), 0)
