"""Parts, groups and their collectives, with the other ranks made up: which rows a rank has, sends and gets."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import DistError

from ops.parallel import groups as module
from ops.parallel import placement
from ops.parallel.connections import clear_losses
from ops.parallel.groups import Group, Parallel, Shard
from ops.parallel.partitions import ParallelSizes, names_sharing, partitions
from ops.parallel.placement import _copies, _packed, first_placement, imbalance, moves, next_placement, slots_for
from ops.parallel.rows import GroupRows, RowShares

HANDLE: Any = "handle"


def test_parts_of_a_dimension_follow_each_other() -> None:
    assert [Shard(rank, 3).part(12) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    assert Shard().part(7) == slice(0, 7)
    assert [Shard(0, 4).padded(total) for total in (0, 1, 4, 5, 8)] == [0, 4, 4, 8, 8]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What each rank has; this one is the second of three. A sum is twice what this rank gives."""
    ranks: list[Tensor] = []

    def gather(out: Tensor, x: Tensor, group: object) -> None:
        assert group is HANDLE
        padded = [torch.cat([rows, rows.new_zeros(len(x) - len(rows), *x.shape[1:])]) for rows in ranks]
        assert torch.equal(x, padded[1])
        out.copy_(torch.cat(padded))

    def scatter(out: Tensor, x: Tensor, group: object) -> None:
        assert group is HANDLE
        assert x.is_contiguous()
        out.copy_(2 * x.chunk(3)[1])

    def all_reduce(x: Tensor, group: object) -> None:
        assert group is HANDLE
        x *= 2

    def all_to_all(out: Tensor, x: Tensor, received: list[int], sent: list[int], group: object) -> None:
        assert group is HANDLE
        ranks.append(x)
        out.copy_(torch.arange(out.numel()).view(out.shape))
        assert (len(out), len(x)) == (sum(received), sum(sent))

    monkeypatch.setattr(module, "all_gather_single", gather)
    monkeypatch.setattr(module, "reduce_scatter_single", scatter)
    monkeypatch.setattr(module, "dist", SimpleNamespace(all_reduce=all_reduce, all_to_all_single=all_to_all))
    return ranks


def rows(first: int, count: int) -> Tensor:
    return torch.arange(first, first + 2 * count, dtype=torch.float32).view(count, 2)


SECOND = Group(1, 3, HANDLE)


@pytest.mark.parametrize("counts", [None, (2, 2, 2), (1, 3, 2), (0, 3, 3), (4, 0, 1)])
def test_rows_of_all_ranks_are_put_together_and_apart(others: list[Tensor], counts: tuple[int, ...] | None) -> None:
    sizes = counts or (2, 2, 2)
    others.extend(rows(10 * rank, count) for rank, count in enumerate(sizes))
    whole = torch.cat(others)
    assert torch.equal(SECOND.gather_rows(others[1], counts), whole)
    assert torch.equal(SECOND.own_rows(whole, counts), others[1])
    assert torch.equal(SECOND.sum_rows(whole, counts), 2 * others[1])


def test_columns_of_all_ranks_are_side_by_side(others: list[Tensor]) -> None:
    others.extend(rows(10 * rank, 3) for rank in range(3))
    assert torch.equal(SECOND.gather_columns(others[1]), torch.cat(others, 1))
    assert torch.equal(SECOND.gather_columns(others[1].T.contiguous().T), torch.cat(others, 1))


def test_sums_and_exchanges(others: list[Tensor]) -> None:
    x = rows(1, 2)
    assert SECOND.all_reduce(x) is x
    assert torch.equal(x, 2 * rows(1, 2))
    came = SECOND.exchange_rows(rows(0, 4), [1, 3, 0], [0, 2, 1])
    assert torch.equal(came, rows(0, 3))
    assert torch.equal(others[0], rows(0, 4))


def test_a_group_of_one_rank_changes_nothing() -> None:
    alone, x = Group(), rows(5, 3)
    for same in (
        alone.all_reduce(x), alone.gather_columns(x), alone.gather_rows(x, (3,)), alone.own_rows(x, (3,)),
        alone.sum_rows(x, None),
    ):  # fmt: skip
        assert same is x
    assert torch.equal(x, rows(5, 3))
    whole = Parallel()
    assert (whole.expert_slots, whole.world, whole.moe_ep) == (0, Group(), Shard())


class Named:
    """A group that says which of its methods was called, and with which counts."""

    def __init__(self, name: str, size: int = 2):
        self.name, self.size = name, size

    def __getattr__(self, method: str) -> Any:
        def call(x: Any, *counts: Any) -> Any:
            return Called(self.name, method, x, *counts)

        return call


class Called(tuple[Any, ...]):
    def __new__(cls, *parts: Any) -> "Called":
        return super().__new__(cls, parts)

    def clone(self) -> "Called":
        return Called("clone", self)


def test_what_is_summed_and_gathered_over_which_group() -> None:
    parallel: Any = SimpleNamespace(world=Named("world"), attn_tp=Named("tp"), attn_dp=Named("dp"))
    x: Any = "x"
    whole: Any = GroupRows(parallel, (3, 5))
    assert (whole.own(x), whole.gather(x), whole.sum(x)) == ("x", "x", ("tp", "all_reduce", "x"))
    assert whole.gather_all(x) == ("dp", "gather_rows", "x", (3, 5))
    assert whole.sum_all(x) == ("dp", "own_rows", ("world", "all_reduce", "x"), (3, 5))
    shares: Any = RowShares(parallel, (4, 6))
    assert shares.counts == (2, 2, 3, 3)
    assert shares.own(x) == ("clone", ("tp", "own_rows", "x", None))
    assert (shares.gather(x), shares.sum(x)) == (("tp", "gather_rows", "x", None), ("tp", "sum_rows", "x", None))
    assert shares.gather_all(x) == ("world", "gather_rows", "x", (2, 2, 3, 3))
    assert shares.sum_all(x) == ("world", "sum_rows", "x", (2, 2, 3, 3))
    assert RowShares(parallel, None).counts is None


def test_ranks_are_divided_into_neighbours_and_strides() -> None:
    sizes = ParallelSizes(world=6, attn_tp=2, moe_tp=3, embed_tp=6, lmhead_tp=1)
    assert partitions(sizes) == {
        "world": ((0, 1, 2, 3, 4, 5),),
        "attn_tp": ((0, 1), (2, 3), (4, 5)),
        "attn_dp": ((0, 2, 4), (1, 3, 5)),
        "embed_tp": ((0, 1, 2, 3, 4, 5),),
        "lmhead_tp": ((0,), (1,), (2,), (3,), (4,), (5,)),
    }
    assert (sizes.attn_dp, sizes.moe_ep, sizes.physical(64)) == (3, 2, 64)
    assert ParallelSizes(world=6, moe_tp=3, expert_slots=5).physical(64) == 10
    assert names_sharing(sizes, "world") == names_sharing(sizes, "embed_tp") == ["world", "embed_tp"]
    assert names_sharing(sizes, "attn_dp") == ["attn_dp"]
    assert ParallelSizes() == ParallelSizes(1, 1, 1, 1, 1, 0)


def test_a_lost_launcher_is_told_in_one_line() -> None:
    with pytest.raises(ConnectionError) as raised, clear_losses():
        raise DistError("x" * 250 + "\nmore")
    assert str(raised.value) == "the connection to the launcher of node 0 is lost: " + "x" * 200
    with clear_losses():
        pass


def counts_of(*counts: int) -> Any:
    return np.array(counts)


def test_further_copies_are_of_experts_whose_copies_have_the_most_tokens() -> None:
    assert _copies(counts_of(80, 10, 10, 20), 2, 3).tolist() == [2, 1, 1, 2]  # no more than ranks
    assert _copies(counts_of(80, 10, 10, 20), 3, 2).tolist() == [3, 1, 1, 1]
    assert _copies(counts_of(80, 50, 10, 20), 4, 2).tolist() == [4, 2, 1, 1]
    assert _copies(counts_of(0, 0, 0), 2, 2).tolist() == [2, 1, 1]
    assert _copies(counts_of(1, 9), 2, 1).tolist() == [1, 1]


def test_an_expert_stays_unless_another_rank_has_clearly_less_to_do() -> None:
    """Two percent of what a rank has on average, 100 tokens."""
    before = counts_of(0, 1, 2, 3)
    assert _packed(counts_of(55, 46, 54, 45), 2, 2, before).tolist() == [0, 1, 2, 3]
    assert _packed(counts_of(57, 46, 54, 43), 2, 2, before).tolist() == [0, 3, 2, 1]


def test_a_full_rank_gives_an_expert_away_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """If experts hardly move, one rank fills up before the last copies come, and the other has those already."""
    monkeypatch.setattr(placement, "SLACK", 0.75)
    before = counts_of(0, 1, 2, 0, 1, 3)
    assert _packed(counts_of(19, 10, 7, 13), 2, 3, before).tolist() == [0, 1, 3, 0, 2, 3]
    before = counts_of(0, 2, 0, 2, 1, 2)
    assert _packed(counts_of(6, 6, 11), 3, 2, before).tolist() == [0, 1, 0, 2, 1, 2]


def test_the_first_placement_is_always_the_same() -> None:
    """Packed weights that were kept depend on it."""
    assert first_placement(4, 2, 3).tolist() == [0, 1, 2, 0, 1, 3]
    assert first_placement(4, 2, 2).tolist() == [0, 2, 1, 3]
    assert first_placement(5, 3, 2).tolist() == [1, 4, 0, 2, 0, 3]


def test_experts_move_where_the_busiest_rank_is_relieved_by_a_twentieth() -> None:
    before = counts_of(0, 1, 2, 3)
    slightly, clearly = counts_of(58, 46, 54, 42), counts_of(60, 46, 54, 40)
    assert _packed(slightly, 2, 2, before).tolist() == [0, 3, 2, 1]  # it would be even
    assert next_placement(slightly, 2, before) is before
    assert next_placement(clearly, 2, before).tolist() == [0, 3, 2, 1]


def test_imbalance_is_the_busiest_ranks_part_of_the_mean() -> None:
    held = counts_of(0, 1, 0, 2)  # half of the tokens of expert 0 are on each rank
    assert imbalance(counts_of(40, 10, 30), held, 2) == 50 / 40
    assert imbalance(counts_of(40, 10, 10), held, 2) == 1.0
    assert imbalance(counts_of(0, 0, 0), held, 2) == 1.0


def test_copies_serve_neighbouring_ranks() -> None:
    held = counts_of(0, 1, 0, 2, 0, 3, 1, 4)  # four ranks with two slots
    found = [slots_for(rank, 4, held).tolist() for rank in range(4)]
    assert found == [[0, 1, 3, 5, 7], [0, 1, 3, 5, 7], [2, 6, 3, 5, 7], [4, 6, 3, 5, 7]]


def test_experts_come_from_the_nearest_rank() -> None:
    before, after = counts_of(0, 1, 2, 3, 4, 5, 0, 6), counts_of(0, 1, 2, 3, 4, 0, 0, 6)
    assert moves(before, after, 4) == [(6, 5)]
    assert moves(before, counts_of(0, 1, 2, 0, 4, 5, 0, 6), 4) == [(0, 3)]
    assert moves(before, counts_of(0, 1, 6, 3, 4, 5, 1, 2), 4) == [(7, 2), (1, 6), (2, 7)]
    assert moves(before, before, 4) == []
