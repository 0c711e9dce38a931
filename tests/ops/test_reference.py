"""The ops of the reference by numbers worked out by hand, and those that only platforms without their own use."""

import math
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ops import composed, load_ops, reference
from ops.format import FORMATS, Quantised
from ops.interface import Heads, Paged, fixed

EPS, CPU = 1e-6, torch.device("cpu")
NONE = torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_norm_rope_write_is_its_parts(heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    tokens, dim, page = 5, 8, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    q_weight, k_weight = torch.rand(dim), torch.rand(dim)
    angles = torch.rand(tokens, dim // 2)
    cos, sin = (torch.cat([part, part], 1) for part in (angles.cos(), angles.sin()))
    places = torch.tensor([6, 1, 9, 2, 4])

    def caches() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3, page, kv_heads, dim), torch.zeros(3, page, kv_heads, dim)

    k_cache, v_cache = caches()
    given = Heads(kv_heads, EPS, q_weight, k_weight, cos, sin)
    found = reference.norm_rope_write(qkv, given, k_cache, v_cache, places, None)
    q = qkv[:, : heads * dim].view(tokens, heads, dim)
    k = qkv[:, heads * dim : (heads + kv_heads) * dim].view(tokens, kv_heads, dim)
    v = qkv[:, (heads + kv_heads) * dim :].view(tokens, kv_heads, dim)
    q, k = reference.rope(reference.rms_norm(q, q_weight, EPS), reference.rms_norm(k, k_weight, EPS), cos, sin)
    wanted = caches()
    reference.write_kv(k, v, *wanted, places)
    assert torch.equal(found, q)
    assert torch.equal(k_cache, wanted[0])
    assert torch.equal(v_cache, wanted[1])
    assert k_cache.count_nonzero() == v_cache.count_nonzero() == tokens * kv_heads * dim


def rounded(x: torch.Tensor) -> Any:
    return (x.double() * 10000).round().div(10000).tolist()


def test_a_matrix_is_filled_row_by_row() -> None:
    matrix = reference.matrix(4, 2, FORMATS["bfloat16"], CPU)
    assert (matrix.rows, matrix.columns, matrix.nbytes, matrix.data.dtype) == (4, 2, 16, torch.bfloat16)
    assert matrix.storages == [matrix.data]
    matrix.data.zero_()
    matrix.fill(1, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert matrix.data.tolist() == [[0, 0], [1, 2], [3, 4], [0, 0]]
    matrix.fill(3, Quantised(4, torch.tensor([[9, 7]], dtype=torch.uint8), torch.tensor([[2.0]]), None))
    assert matrix.data[3].tolist() == [2.0, -2.0]


def experts_of(count: int = 3, inner: int = 2, hidden: int = 4) -> reference.DenseExperts:
    experts = reference.expert_matrices(count, inner, hidden, FORMATS["float32"], CPU)
    for expert in range(count):
        for number, (which, shape) in enumerate(
            (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner)))
        ):
            size = shape[0] * shape[1]
            experts.fill(expert, which, torch.arange(size).view(shape) / size + expert + number / 10)
    return experts


def test_experts_stack_gate_and_up() -> None:
    experts = experts_of()
    assert (experts.count, experts.w13.shape, experts.w2.shape) == (3, (3, 4, 4), (3, 4, 2))
    assert experts.nbytes == 4 * (3 * 16 + 3 * 8)
    assert [part is whole for part, whole in zip(experts.storages, (experts.w13, experts.w2), strict=True)] == [
        True
    ] * 2
    assert rounded(experts.w13[1, :, 0]) == [1.0, 1.5, 1.1, 1.6]
    assert rounded(experts.w2[2, :, 1]) == [2.325, 2.575, 2.825, 3.075]


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


@pytest.mark.parametrize(
    ("x", "weight", "wanted"),
    [("float32", "bfloat16", "float32"), ("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "float32", "float32")],
)
def test_a_product_has_the_wider_type(x: str, weight: str, wanted: str) -> None:
    matrix = reference.matrix(2, 3, FORMATS[weight], CPU)
    matrix.fill(0, torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 0.5]]))
    given = torch.tensor([[1.0, 0.0, 2.0]], dtype=getattr(torch, x))
    plain, biased = reference.linear(given, matrix, None), reference.linear(given, matrix, torch.tensor([0.5, 2.0]))
    assert (plain.tolist(), biased.tolist()) == ([[7.0, 1.0]], [[7.5, 3.0]])
    assert plain.dtype == biased.dtype == getattr(torch, wanted)


def test_norms_divide_by_the_root_of_the_mean_square() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, -1.0])
    root = (12.5 + 0.5) ** 0.5
    assert rounded(reference.rms_norm(x, weight, 0.5)) == [[round(6 / root, 4), round(-4 / root, 4)]]
    normed, total = reference.add_rms_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]), weight, 0.5)
    assert total.tolist() == [[3.0, 4.0]]
    assert torch.equal(normed, reference.rms_norm(x, weight, 0.5))
    assert reference.rms_norm(x.bfloat16(), weight, 0.5).dtype == torch.bfloat16
    assert reference.vector_type(torch.bfloat16) == torch.float32


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


def test_rotation_turns_the_halves_of_each_head() -> None:
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.tensor([[0.5, 1.0, 0.25, 0.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    turned, doubled = reference.rope(q, 2 * q, cos, sin)
    assert turned.tolist() == [[[0.5 - 3.0, 2.0 - 8.0, 0.75 + 3.0, 0.0 + 8.0]]]
    assert torch.equal(doubled, 2 * turned)
    assert reference.rope(q.bfloat16(), q.bfloat16(), cos, sin)[0].dtype == torch.bfloat16


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
    assert reference._cached(caches[0], torch.tensor([1, 0]), 5)[:, 0].tolist() == [
        [0, 0], [254, -100], [0, 0], [0, 0], [0, 0],
    ]  # fmt: skip


def test_attention_is_causal_over_the_pages_of_each_sequence() -> None:
    """Of two sequences in pages of two tokens; a pair of query heads shares each head of the cache."""
    torch.manual_seed(5)
    dim, heads, kv_heads = 3, 4, 2
    caches = torch.randn(2, 5, 2, kv_heads, dim)
    tables, starts, lengths = torch.tensor([[3, 1, 0], [4, 0, 0]]), (0, 2, 3), (5, 2)
    tables[0, 2] = 2
    q = torch.randn(3, heads, dim)
    found = reference.attention(q, caches[0], caches[1], Paged(NONE, tables, starts, lengths), 0.5)
    for row, (sequence, end) in enumerate(((0, 4), (0, 5), (1, 2))):
        pages = tables[sequence]
        keys, values = (cache[pages].flatten(0, 1)[:end] for cache in caches)
        for head in range(heads):
            scores = 0.5 * keys[:, head // 2] @ q[row, head]
            torch.testing.assert_close(found[row, head], scores.softmax(0) @ values[:, head // 2])
    as_tensors = Paged(NONE, tables, torch.tensor(starts), torch.tensor(lengths))
    assert torch.equal(reference.attention(q, caches[0], caches[1], as_tensors, 0.5), found)


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


def test_what_paging_gives_is_what_it_was_given() -> None:
    tables = torch.tensor([[1, 2]])
    found = reference.paging(array("q", [7, 8]), tables, array("q", [0, 2]), array("q", [5]), 4)
    assert [torch.as_tensor(one).tolist() for one in found] == [[7, 8], [[1, 2]], [0, 2], [5]]


def test_a_norm_of_parts_without_a_kernel_is_composed() -> None:
    """Of two query heads and one key and value head, each of two numbers."""
    done: list[Any] = []

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        done.append(("norm", x.tolist(), weight.tolist(), eps))
        return x + weight

    def rope(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any) -> tuple[torch.Tensor, torch.Tensor]:
        done.append(("rope", cos, sin))
        return 2 * q, 3 * k

    def write_kv(k: torch.Tensor, v: torch.Tensor, *rest: Any) -> None:
        done.append(("write", k.tolist(), v.tolist(), *rest))

    ops: Any = SimpleNamespace(rms_norm=rms_norm, rope=rope, write_kv=write_kv)
    qkv, angles = torch.arange(8.0)[None], cast(Any, ("cos", "sin"))
    q_weight, k_weight = torch.tensor([10.0, 20.0]), torch.tensor([30.0, 40.0])
    caches: Any = ("k cache", "v cache", "slots")
    heads: Any = Heads(1, EPS, q_weight, k_weight, *angles)
    q = composed.norm_rope_write(ops, qkv, heads, *caches)
    assert q.tolist() == [[[20.0, 42.0], [24.0, 46.0]]]
    assert done == [
        ("norm", [[[0, 1], [2, 3]]], [10, 20], EPS), ("norm", [[[4, 5]]], [30, 40], EPS), ("rope", "cos", "sin"),
        ("write", [[[102, 135]]], [[[6, 7]]], *caches),
    ]  # fmt: skip


def test_ops_are_loaded_by_name_and_parameters_need_no_gradient() -> None:
    from_name: Any = load_ops("reference")
    assert from_name is reference
    kept = fixed(torch.tensor([1.0]))
    assert not kept.requires_grad
    assert kept.tolist() == [1.0]
