"""Experts that are copied from bank to bank compute what they computed where they came from."""

from collections.abc import Iterator

import pytest
import torch

from tests.experts import fill_experts, kind_of
from umbra.ops import load_ops
from umbra.ops.cpu import engine
from umbra.ops.cpu.engine import native
from umbra.ops.formats import FORMATS, Format
from umbra.ops.interface import MovableExperts, Ops

COUNT, INNER, HIDDEN = 5, 96, 64
KINDS = {
    "float32": FORMATS["float32"],
    "bfloat16": FORMATS["bfloat16"],
    "q8": FORMATS["q8"],
    "q4 zeros": Format("q4", 32, zeros=True),
    "f8": Format("f8", 32),
    "mxfp4": FORMATS["mxfp4"],
    "w8a8": Format("w8a8", 32),
    "q8 and q4": Format("q8", 32, down=FORMATS["q4"]),
}


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    engine.start(1, "auto")


def filled(ops: Ops, format: Format, seed: int) -> MovableExperts:
    torch.manual_seed(seed)
    kind = kind_of(format)
    experts = ops.expert_matrices(COUNT, INNER, HIDDEN, format, torch.device("cpu"), kind)
    fill_experts(COUNT, INNER, HIDDEN, kind, experts)
    return experts


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("name", "kind"), [("reference", "float32"), *(("cpu", kind) for kind in KINDS)])
def test_moved_experts_compute_the_same(name: str, kind: str, nodes: int) -> None:
    """Two of one bank in places of another, whose other experts stay as they are."""
    engine.start_teams([native.Team(-1, 1, []) for _ in range(nodes)], "auto")
    ops = load_ops(name)
    source, target = (filled(ops, KINDS[kind], seed) for seed in (1, 2))
    x = torch.randn(COUNT, HIDDEN)

    def alone(experts: MovableExperts) -> list[torch.Tensor]:
        return [ops.moe(x, torch.ones(COUNT, 1), torch.full((COUNT, 1), e), experts, None) for e in range(COUNT)]

    theirs, expected = alone(source), alone(target)
    stored = source.stored([4, 1])
    assert stored.dtype == torch.uint8
    assert source.stored([]).shape == (0, stored.shape[1])
    target.restore([0, 3], stored)
    target.restore([], source.stored([]))
    expected[0], expected[3] = theirs[4], theirs[1]
    for sums, wanted in zip(alone(target), expected, strict=True):
        assert torch.equal(sums, wanted)
