"""The ops of the reference by numbers worked out by hand, and those that only platforms without their own use."""

import math
from typing import Any

import pytest
import torch

from umbra.ops import reference
from umbra.ops.formats import FORMATS
from umbra.ops.interface import Heads

EPS, CPU = 1e-6, torch.device("cpu")


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_norm_rope_write_is_its_parts(heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    tokens, dim, page = 5, 8, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    q_weight, k_weight = torch.rand(dim), torch.rand(dim)
    angles = torch.rand(tokens, dim // 2)
    cos, sin = (torch.cat([part, part], 1) for part in (angles.cos(), angles.sin()))
    slot_mapping = torch.tensor([6, 1, 9, 2, 4])

    def caches() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3, page, kv_heads, dim), torch.zeros(3, page, kv_heads, dim)

    k_cache, v_cache = caches()
    given = Heads(kv_heads, EPS, q_weight, k_weight, cos, sin)
    queries = reference.norm_rope_write(qkv, given, k_cache, v_cache, slot_mapping, None)
    q = qkv[:, : heads * dim].view(tokens, heads, dim)
    k = qkv[:, heads * dim : (heads + kv_heads) * dim].view(tokens, kv_heads, dim)
    v = qkv[:, (heads + kv_heads) * dim :].view(tokens, kv_heads, dim)
    q, k = reference.rope(reference.rms_norm(q, q_weight, EPS), reference.rms_norm(k, k_weight, EPS), cos, sin)
    wanted = caches()
    reference.write_kv(k, v, *wanted, slot_mapping)
    assert torch.equal(queries, q)
    assert torch.equal(k_cache, wanted[0])
    assert torch.equal(v_cache, wanted[1])
    assert k_cache.count_nonzero() == v_cache.count_nonzero() == tokens * kv_heads * dim


def rounded(x: torch.Tensor) -> Any:
    return (x.double() * 10000).round().div(10000).tolist()


def experts_of(count: int = 3, inner: int = 2, hidden: int = 4) -> reference.DenseExperts:
    experts = reference.expert_matrices(count, inner, hidden, FORMATS["float32"], CPU)
    for expert in range(count):
        for number, (which, shape) in enumerate(
            (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner)))
        ):
            size = shape[0] * shape[1]
            experts.fill(expert, which, torch.arange(size).view(shape) / size + expert + number / 10)
    return experts


def test_the_mixture_is_the_weighted_sum_of_the_experts_here() -> None:
    experts = experts_of()
    x = torch.tensor([[1.0, -1.0, 0.5, 2.0], [0.1, 0.2, 0.3, 0.4]])
    weights, ids = torch.tensor([[0.5, 0.25, 4.0], [1.0, 2.0, 3.0]]), torch.tensor([[6, 4, 9], [5, 5, 3]])

    def one(row: int, expert: int) -> torch.Tensor:
        gate, up = experts.w13[expert].chunk(2)
        inner = torch.nn.functional.silu(gate @ x[row]) * (up @ x[row])
        return experts.w2[expert] @ inner

    wanted = torch.stack([0.5 * one(0, 2) + 0.25 * one(0, 0), 3.0 * one(1, 1)])
    torch.testing.assert_close(reference.moe(x, weights, ids, experts, 4), wanted)
    here = torch.where((ids >= 4) & (ids < 7), ids - 4, -1)
    torch.testing.assert_close(reference.moe(x, weights, here, experts, None), wanted)
    assert reference.moe(x.bfloat16(), weights, ids, experts, 4).dtype == torch.bfloat16


def test_an_embedding_has_rows_of_the_own_part_only() -> None:
    table = reference.table(3, 2, torch.float32, CPU)
    reference.fill_table(table, torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    ids = torch.tensor([3, 4, 5, 6, 7, 0])
    assert reference.embedding(ids, table, 4).tolist() == [[0, 0], [1, 2], [3, 4], [5, 6], [0, 0], [0, 0]]
    assert reference.embedding(torch.tensor([2, 0]), table, None).tolist() == [[5, 6], [1, 2]]


def test_parts_of_norms_are_scaled_by_what_all_ranks_have() -> None:
    """Two vectors of 4 and 2 numbers, of which this rank has 2 and 1; the others have as large ones."""
    parts, weights = (
        [torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0]])],
        [torch.tensor([1.0, 2.0]), torch.tensor([3.0])],
    )
    summed: list[Any] = []

    def total(squares: torch.Tensor) -> torch.Tensor:
        summed.append(squares.tolist())
        return 2 * squares

    first, second = reference.split_rms_norm(parts, weights, [4, 2], 0.5, total)
    assert summed == [[[25.0], [4.0]]]
    assert rounded(first) == [[round(3 / 13**0.5, 4), round(8 / 13**0.5, 4)]]
    assert rounded(second) == [[round(6 / 4.5**0.5, 4)]]


def test_a_cache_of_int8_has_a_scale_behind_each_row() -> None:
    assert reference.kv_cache(2, 3, 4, 8, torch.bfloat16, CPU).shape == (2, 3, 4, 8)
    caches = [reference.kv_cache(2, 3, 1, 2, torch.int8, CPU) for _ in "kv"]
    assert caches[0].shape == (2, 3, 1, 6)
    k = torch.tensor([[[254.0, -100.0]], [[0.0, 0.0]]])
    reference.write_kv(k, k / 2, caches[0], caches[1], torch.tensor([4, 1]))
    assert caches[0].flatten(0, 1)[4, 0, :2].tolist() == [127, -50]
    assert caches[0].flatten(0, 1)[4, 0, 2:].clone().view(torch.float32).tolist() == [2.0]
    assert caches[1].flatten(0, 1)[4, 0, 2:].clone().view(torch.float32).tolist() == [1.0]
    assert not caches[0].flatten(0, 1)[[0, 1, 2, 3, 5]].any()


def test_gates_and_routes() -> None:
    x = torch.tensor([[0.0, 2.0, 3.0, -1.0]])
    gated = 2.0 / (1 + math.exp(-2.0)) * -1.0
    assert rounded(reference.silu_mul(x)) == [[0.0, round(gated, 4)]]
    logits = torch.tensor([[0.0, math.log(3.0), math.log(4.0)]])
    weights, ids = reference.route_softmax(logits, 2, False)
    assert (rounded(weights), ids.tolist()) == ([[0.5, 0.375]], [[2, 1]])
    assert rounded(reference.route_softmax(logits, 2, True)[0]) == [[round(4 / 7, 4), round(3 / 7, 4)]]
    weights, ids = reference.route_sigmoid(logits, None, 2, False)
    assert (rounded(weights), ids.tolist()) == ([[0.8, 0.75]], [[2, 1]])
    weights, ids = reference.route_sigmoid(logits, torch.tensor([0.5, 0.0, 0.0]), 2, True)  # a bias only chooses
    assert (rounded(weights), ids.tolist()) == ([[round(0.5 / 1.3, 4), round(0.8 / 1.3, 4)]], [[0, 2]])
    assert reference.argmax(torch.tensor([[1.0, 3.0, 3.0], [5.0, 2.0, 1.0]])).tolist() == [1, 0]
