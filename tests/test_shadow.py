"""Shadow experts: the same bits for every placement, tables that change between replays, and faults that are told."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ops import load_ops
from ops.cpu import engine, shadow
from ops.cpu.engine import native
from ops.cpu.matrix import NativeExperts
from ops.interface import FORMATS, Format

CPU = torch.device("cpu")
cpu = load_ops("cpu")
KINDS = {k: FORMATS[k] for k in ("float32", "bfloat16", "q8", "q4")} | {"q4 zeros": Format("q4", 64, zeros=True)}


def teams(*threads: int) -> list[object]:
    return [native().Team(-1, count, []) for count in threads]


@pytest.fixture(params=[((1,), (1,)), ((2,), (3,)), ((1, 2), (2, 1, 1))], ids=["1 1", "2 3", "1+2 2+1+1"])
def pool(request: pytest.FixtureRequest) -> Iterator[shadow.ShadowPool]:
    device, other = request.param
    engine.start_teams(teams(*device), "auto")
    yield shadow.ShadowPool(teams(*other))
    engine.start(1, "auto")


class Model:
    """One layer's experts three times: all-resident as ops.moe takes them, in the store, and room for all in slots."""

    def __init__(self, format: Format, count: int = 8, inner: int = 64, hidden: int = 192, first: int = 0):
        self.experts = NativeExperts(count, inner, hidden, format, CPU)
        self.blocks, self.first = shadow.ExpertBlocks(inner, hidden, format), first
        size = self.blocks.block_bytes
        buffers = [native().Buffer(count * size, 0) for _ in range(2)]
        self.store, self.slots = (torch.frombuffer(b, dtype=torch.uint8).view(count, size) for b in buffers)
        for e in range(count):
            for which, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                part = torch.randn(shape) / shape[1] ** 0.5
                self.experts.fill(e, which, part)
                self.blocks.fill(self.store[e].data_ptr(), which, part)
        self.addresses = torch.tensor([x.data_ptr() for x in self.store])
        self.layer = shadow.ShadowLayer(
            3, self.blocks, self.addresses, torch.zeros(count, dtype=torch.int64),
            torch.zeros(count, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), self.store, first,
        )  # fmt: skip

    def place(self, resident: list[int]) -> None:
        """In place, each in a slot of its own that was garbage before."""
        self.layer.device.zero_()
        self.slots.fill_(0x7F)
        for e, slot in zip(resident, random.sample(range(len(self.slots)), len(resident)), strict=True):
            self.slots[slot].copy_(self.store[e])
            self.layer.device[e] = self.slots[slot].data_ptr()

    def moe(self, pool: shadow.ShadowPool, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        job = shadow.submit(pool, self.layer, x, ids)
        shadow.resident_rows(job)
        return shadow.join(job, weights)

    def expected(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return cpu.moe(x, weights, ids, self.experts, self.first)


def placements(count: int) -> list[list[int]]:
    return [[], list(range(count)), *(random.sample(range(count), random.randrange(count + 1)) for _ in range(3))]


def routing(tokens: int, top_k: int, count: int) -> tuple[Tensor, Tensor]:
    """Ids of count + 4 experts, the first two and last two elsewhere, some negative, some repeated."""
    ids = torch.stack([torch.randperm(count + 4)[:top_k] for _ in range(tokens)])
    if tokens > 3:
        ids[1, 0] = -1
        ids[2] = ids[2, 0]
    return torch.rand(tokens, top_k), ids


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 8), (2, 3), (7, 8), (40, 4), (40, 8)])
@pytest.mark.parametrize("format", KINDS.values(), ids=KINDS)
def test_any_placement_gives_the_same_bits(format: Format, tokens: int, top_k: int, pool: shadow.ShadowPool) -> None:
    torch.manual_seed(tokens)
    random.seed(tokens)
    model = Model(format, first=2)
    x = torch.randn(tokens, 192)
    weights, ids = routing(tokens, top_k, 8)
    tape = engine.Tape()
    with tape.capture():
        captured = model.moe(pool, x, weights, ids)
    records = len(tape.records)
    for resident in placements(8):
        model.place(resident)
        expected = model.expected(x, weights, ids)
        assert torch.equal(model.moe(pool, x, weights, ids), expected)
        tape.replay()
        assert torch.equal(captured, expected)
        x.copy_(torch.randn(x.shape))
        weights[:], ids[:] = routing(tokens, top_k, 8)
    assert len(tape.records) == records == 3
