"""Triton's kernels for rows in its interpreter, on CPU tensors, against what the ops mean."""

import pytest
import torch
from torch import Tensor

import tests.ops.cuda.kernels.interpreter
from umbra.ops import reference
from umbra.ops.cuda import kernels
from umbra.ops.interface import Heads

assert tests.ops.cuda.kernels.interpreter
DTYPES = [torch.float32, torch.float16]  # the interpreter cuts bfloat16 off instead of rounding


def close(ours: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """A rounding to float16 may fall to the other side."""
    for x, y in zip(ours, wanted, strict=True):
        assert x.is_contiguous()
        atol, rtol = (1e-3, 2e-3) if y.dtype == torch.float16 else (1e-6, 1e-5)
        torch.testing.assert_close(x, y, atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_the_references(dtype: torch.dtype) -> None:
    """Also of views whose rows are apart, and with a bias."""
    torch.manual_seed(1)
    x, residual = torch.randn(3, 80).to(dtype), torch.randn(3, 70).to(dtype)[:, :40]
    weight, bias = torch.randn(40).to(dtype), torch.randn(40)
    for given in (x[:, 8:48], x[:, :80].unflatten(1, (2, 40)), x[:, 40:].unflatten(1, (1, 40)), x[0, :40], x[:0, :40]):
        close((kernels.rms_norm(given, weight, 1e-5),), (reference.rms_norm(given, weight, 1e-5),))
    for of in (None, bias):
        given = x[:, 8:48], residual, weight, 1e-5, of
        close(kernels.add_rms_norm(*given), reference.add_rms_norm(*given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_rotated_and_cached(dtype: torch.dtype) -> None:
    """Half a head is no power of two; nothing but the rows' slots is written."""
    torch.manual_seed(2)
    dim, q_heads, kv, rows = 12, 3, 2, 4
    qkv = torch.randn(rows, 100).to(dtype)[:, : (q_heads + 2 * kv) * dim]
    angles = torch.randn(2, rows, dim)
    heads = Heads(kv, 1e-6, torch.randn(dim).to(dtype), torch.randn(dim).to(dtype), *angles)
    slots = torch.tensor([5, 19, 2, 8])
    ours, wanted = (torch.full((2, 5, 4, kv, dim), 7.0, dtype=dtype).unbind() for _ in range(2))
    q = kernels.norm_rope_write(qkv, heads, ours[0], ours[1], slots, None)
    close((q, *ours), (reference.norm_rope_write(qkv, heads, wanted[0], wanted[1], slots, None), *wanted))


@pytest.mark.parametrize("experts", [12, 64])
def test_routers_choose_as_the_reference(experts: int) -> None:
    """Among equal scores the first is chosen, also where all that are left are infinitely small."""
    torch.manual_seed(3)
    logits = torch.randint(-3, 4, (5, experts)).to(torch.bfloat16)
    logits[1], logits[2, 2:] = 0, float("-inf")
    bias = torch.randint(-1, 2, (experts,)) / 4
    for top_k, renormalise, scale in ((1, False, 1.0), (5, True, 2.5)):
        rest = top_k, renormalise, scale
        close(kernels.route_softmax(logits, *rest), reference.route_softmax(logits, *rest))
        for of in (None, bias):
            close(kernels.route_sigmoid(logits, of, *rest), reference.route_sigmoid(logits, of, *rest))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_multiply(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x = torch.randn(3, 2500).to(dtype)[:, :2400]
    close((kernels.silu_mul(x),), (reference.silu_mul(x),))
