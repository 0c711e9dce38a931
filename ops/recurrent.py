"""The meaning of the ops with states of gated DeltaNet layers, as reference.py has that of the others."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.interface import Recurrent


def _in_order(states: Tensor, recurrent: Recurrent, run: Callable[[slice, Tensor], Tensor]) -> None:
    """Calls `run` for every sequence, up to its mark and from there on, with its rows and the state before them. It
    returns the state after them."""
    starts, reads, writes, marks, marked = (x.tolist() for x in recurrent)
    for s, read in enumerate(reads):
        start, end, mark = starts[s], starts[s + 1], starts[s] + marks[s]
        state = torch.zeros_like(states[0]) if read < 0 else states[read].clone()
        if marks[s]:
            states[marked[s]] = state = run(slice(start, mark), state)
        if mark < end:
            state = run(slice(mark, end), state)
        if start < end and writes[s] >= 0:
            states[writes[s]] = state


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, recurrent: Recurrent) -> Tensor:
    out, taps = torch.zeros(x.shape, dtype=x.dtype, device=x.device), len(weight)

    def run(rows: slice, state: Tensor) -> Tensor:
        inputs = torch.cat((state, x[rows].float()))
        out[rows] = F.silu((inputs.unfold(0, taps, 1) * weight.T).sum(-1)).to(x.dtype)
        return inputs[len(inputs) - taps + 1 :]

    _in_order(states, recurrent, run)
    return out


def gated_delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, rates: Tensor, dt_bias: Tensor, states: Tensor, recurrent: Recurrent
) -> Tensor:
    _, heads, depth, width = states.shape
    keys = (qkv.shape[1] - heads * width) // 2
    q, k, v = qkv.float().split([keys, keys, heads * width], 1)
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(heads * depth // keys, 1)
        for x in (q.unflatten(1, (-1, depth)), k.unflatten(1, (-1, depth)))
    )
    q, v, beta = q * depth**-0.5, v.unflatten(1, (-1, width)), b.float().sigmoid()
    decay = (-rates * F.softplus(a.float() + dt_bias)).exp()
    out = torch.zeros_like(v, dtype=qkv.dtype)

    def run(rows: slice, state: Tensor) -> Tensor:
        for t in range(rows.start, rows.stop):
            state = state * decay[t, :, None, None]
            change = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t, :, :, None] * change[:, None]
            out[t] = torch.einsum("hkv,hk->hv", state, q[t]).to(qkv.dtype)
        return state

    _in_order(states, recurrent, run)
    return out
