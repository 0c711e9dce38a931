"""Rows that go to the ranks of their experts and back give the sums that all experts on one rank give."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from tests.ranks import free_port
from umbra.ops import load_ops, reference
from umbra.ops.exchange import GroupExchange
from umbra.ops.formats import Format
from umbra.ops.interface import PhysicalExperts
from umbra.ops.reference import DenseExperts

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


def body(rank: int, port: int, ranks: int, tokens: int, by_table: bool) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    per_rank = EXPERTS // ranks
    turned = torch.arange(EXPERTS).roll(3)  # the physical expert of each expert, whose weights are those of its number
    physical = PhysicalExperts(turned.int(), torch.zeros(per_rank, dtype=torch.int64)) if by_table else None
    exchange, bank = GroupExchange(load_ops("reference")), experts(rank * per_rank, per_rank)
    x, weights, ids = rows(rank, tokens)
    assert exchange.takes(tokens, bank)
    sums = exchange.mixture(x, weights, ids, bank, physical)
    expected = reference.moe(x, weights, turned[ids] if by_table else ids, experts(0, EXPERTS), None)
    assert torch.allclose(sums, expected, atol=1e-4)
    if physical:  # the rows that came are counted
        came = torch.cat([turned[rows(other, tokens)[2]] for other in range(ranks)]).flatten()
        assert torch.equal(physical.rows, came.bincount(minlength=EXPERTS)[rank * per_rank : (rank + 1) * per_rank])
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "tokens", "by_table"), [(2, 5, False), (4, 1, False), (2, 5, True)])
def test_exchanged_rows_give_the_same_sums(ranks: int, tokens: int, by_table: bool) -> None:
    arguments = free_port(), ranks, tokens, by_table
    start_processes(body, arguments, nprocs=ranks, start_method="fork")
