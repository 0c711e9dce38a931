"""Every implementation of every op against the reference, over one list of cases."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops import IMPLEMENTATIONS, load_ops
from ops.interface import Ops

reference = load_ops("reference")
OTHERS = [name for name in IMPLEMENTATIONS if name != "reference"]
NAMES = [name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def paged(lens: list[int], new: list[int], kv_heads: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of `attention`: sequences of lens[s] cached tokens, the last new[s] of them asking."""
    page_size = 4
    pages = [-(-n // page_size) for n in lens]
    order = torch.randperm(sum(pages)).tolist()
    tables = torch.zeros(len(lens), max(pages), dtype=torch.int64)
    for s, count in enumerate(pages):
        tables[s, :count] = torch.tensor([order.pop() for _ in range(count)])
    caches = [randn(sum(pages), page_size, kv_heads, dim, dtype=dtype) for _ in "kv"]
    starts = torch.tensor([0, *new]).cumsum(0)
    return (randn(sum(new), heads, dim, dtype=dtype), *caches, tables, starts, torch.tensor(lens), dim**-0.5)


def moe(tokens: int, top_k: int, here: int, first: int, dtype: torch.dtype) -> tuple[Any, ...]:
    experts, hidden, inner = 8, 32, 16
    weights, ids = reference.route_softmax(randn(tokens, experts), top_k, True)
    scale = hidden**-0.5
    w13, w2 = randn(here, 2 * inner, hidden, dtype=dtype) * scale, randn(here, hidden, inner, dtype=dtype) * scale
    return randn(tokens, hidden, dtype=dtype), weights, ids, w13, w2, first


Make = Callable[[torch.dtype], tuple[Any, ...]]
CASES: list[tuple[str, str, Make]] = [
    ("embedding", "middle shard", lambda d: (torch.tensor([0, 5, 9, 12, 5]), randn(5, 8, dtype=d), 5)),
    ("linear", "one token", lambda d: (randn(1, 64, dtype=d), randn(48, 64, dtype=d) / 8, None)),
    ("linear", "with bias", lambda d: (randn(17, 64, dtype=d), randn(48, 64, dtype=d) / 8, randn(48, dtype=d))),
    ("linear", "no tokens", lambda d: (randn(0, 64, dtype=d), randn(48, 64, dtype=d), None)),
    ("rms_norm", "hidden", lambda d: (randn(5, 64, dtype=d), randn(64, dtype=d), 1e-6)),
    ("rms_norm", "heads", lambda d: (randn(5, 3, 16, dtype=d), randn(16, dtype=d), 1e-5)),
    ("add_rms_norm", "hidden", lambda d: (randn(5, 64, dtype=d), randn(5, 64, dtype=d), randn(64, dtype=d), 1e-6)),
    ("rope", "heads", lambda d: (randn(5, 3, 16, dtype=d), randn(5, 16), randn(5, 16))),
    ("attention", "decode", lambda d: paged([9, 1, 16], [1, 1, 1], 2, 8, 16, d)),
    ("attention", "prefill", lambda d: paged([9, 1, 16], [9, 1, 16], 2, 8, 16, d)),
    ("attention", "later chunk", lambda d: paged([9, 13], [4, 7], 1, 3, 8, d)),
    ("silu_mul", "rows", lambda d: (randn(5, 64, dtype=d),)),
    ("route_softmax", "renormalised", lambda d: (randn(6, 16, dtype=d), 4, True)),
    ("route_softmax", "plain", lambda d: (randn(6, 16, dtype=d), 2, False)),
    ("moe", "one token", lambda d: moe(1, 2, 8, 0, d)),
    ("moe", "many tokens", lambda d: moe(40, 3, 8, 0, d)),
    ("moe", "some experts elsewhere", lambda d: moe(40, 3, 3, 2, d)),
    ("moe", "no tokens", lambda d: moe(0, 2, 8, 0, d)),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("op", "case", "make"), CASES, ids=[f"{op}-{case}" for op, case, _ in CASES])
@pytest.mark.parametrize("implementation", OTHERS)
def test_equals_reference(implementation: str, op: str, case: str, make: Make, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    arguments = make(dtype)
    expected = getattr(reference, op)(*arguments)
    actual = getattr(load_ops(implementation), op)(*arguments)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_write_kv_touches_its_slots_only(implementation: str) -> None:
    k_cache, v_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    k, v = randn(2, 2, 8), randn(2, 2, 8)
    load_ops(implementation).write_kv(k, v, k_cache, v_cache, torch.tensor([6, 9]))
    assert torch.equal(k_cache[1, 2], k[0])
    assert torch.equal(v_cache[2, 1], v[1])
    for cache in (k_cache, v_cache):
        assert cache.flatten(0, 1).abs().sum((1, 2)).nonzero().flatten().tolist() == [6, 9]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_signatures_are_the_interface(implementation: str) -> None:
    """An implementation has every op, with the parameters of `interface.py` in its order."""
    for name in NAMES:
        declared = list(inspect.signature(getattr(Ops, name)).parameters)[1:]
        assert list(inspect.signature(getattr(load_ops(implementation), name)).parameters) == declared


def test_every_op_has_a_case() -> None:
    assert {op for op, _, _ in CASES} | {"write_kv"} == set(NAMES)
