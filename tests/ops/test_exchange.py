"""Rows that go to the ranks of their experts and back give the sums that all experts on one rank give."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.multiprocessing.spawn as multiprocessing
from torch import Tensor

from ops import exchange as ops_exchange
from ops import load_ops, reference
from ops.exchange import GroupExchange
from ops.format import Format
from ops.reference import DenseExperts
from tests.ranks import free_port

FLOATS = Format("float32")
EXPERTS, INNER, HIDDEN, TOP_K = 8, 16, 32, 3


def experts(first: int, count: int) -> DenseExperts:
    """The experts first .. first + count - 1, whose weights are the same on every rank."""
    bank = load_ops("reference").expert_matrices(count, INNER, HIDDEN, FLOATS, torch.device("cpu"))
    for expert in range(EXPERTS):
        generator = torch.Generator().manual_seed(expert)
        for which, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            part = torch.randn(shape, generator=generator)
            if first <= expert < first + count:
                bank.fill(expert - first, which, part)
    return bank  # type: ignore[return-value]


def rows(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights, and ids, which never name the last expert."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, scores = torch.randn(tokens, HIDDEN, generator=generator), torch.rand(tokens, EXPERTS - 1, generator=generator)
    weights, ids = scores.topk(TOP_K)
    return x, weights, ids


def body(rank: int, port: int, ranks: int, tokens: int, mutated: bool) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    exchange: Any = GroupExchange(load_ops("reference"))
    x, weights, ids = rows(rank, tokens)
    if mutated:  # rows come back in another order
        move = exchange._moved
        exchange._moved = lambda *given: move(*given).flip(0)
    each = EXPERTS // ranks
    found = exchange.mixture(x, weights, ids, experts(rank * each, each))
    expected = reference.moe(x, weights, ids, experts(0, EXPERTS), None)
    assert torch.allclose(found, expected, atol=1e-4) != mutated
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "tokens", "mutated"), [(2, 5, False), (4, 1, False), (2, 5, True)])
def test_exchanged_rows_give_the_same_sums(ranks: int, tokens: int, mutated: bool) -> None:
    arguments = free_port(), ranks, tokens, mutated
    multiprocessing.start_processes(body, arguments, nprocs=ranks, start_method="fork")


class Wires:
    """torch.distributed's all-to-all between threads of this process, each of which is a rank."""

    def __init__(self, ranks: int):
        self.ranks, self.barrier = ranks, threading.Barrier(ranks)
        self.sent: list[tuple[Tensor, ...]] = [()] * ranks
        self.here = threading.local()

    def get_world_size(self, group: object) -> int:
        return self.ranks

    def all_to_all_single(
        self, out: Tensor, x: Tensor, came: list[int] | None = None, went: list[int] | None = None, group: object = None
    ) -> None:
        rank = self.here.rank
        self.sent[rank] = x.split(went) if went else x.chunk(self.ranks)
        self.barrier.wait(10)
        found = torch.cat([parts[rank] for parts in self.sent])
        assert came is None or [len(parts[rank]) for parts in self.sent] == came
        self.barrier.wait(10)
        out.copy_(found.view_as(out))


@pytest.mark.parametrize("by_slots", [False, True])
def test_ranks_in_threads_exchange_rows(monkeypatch: pytest.MonkeyPatch, by_slots: bool) -> None:
    """As above; experts in slots are found there, and the rows that came are counted."""
    ranks, each, ops = 2, EXPERTS // 2, load_ops("reference")
    wires, found = Wires(ranks), list[Any]([None] * ranks)
    monkeypatch.setattr(ops_exchange, "dist", wires)
    turned = torch.arange(EXPERTS).roll(3)  # the slot of each expert, whose weights are those of its number
    slots = [SimpleNamespace(of=lambda ids: turned[ids], rows=torch.zeros(each, dtype=torch.int64)) for _ in range(2)]

    def rank_of(rank: int) -> None:
        wires.here.rank = rank
        exchange = GroupExchange(ops)
        x, weights, ids = rows(rank, 5)
        bank = experts(rank * each, each)
        assert exchange.takes(5, bank)
        given: Any = slots[rank] if by_slots else None
        found[rank] = exchange.mixture(x, weights, ids, bank, given)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    for rank in range(ranks):
        x, weights, ids = rows(rank, 5)
        ids = turned[ids] if by_slots else ids
        counts += ids.flatten().bincount(minlength=EXPERTS)
        expected = reference.moe(x, weights, ids, experts(0, EXPERTS), None)
        assert torch.allclose(found[rank], expected, atol=1e-4)
    assert torch.cat([slot.rows for slot in slots]).tolist() == (counts if by_slots else 0 * counts).tolist()
