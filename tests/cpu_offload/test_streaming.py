"""Long steps whose missing experts are streamed to the device: the same bits, the same counts, and the records."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cpu_offload.cpu import CpuExperts
from cpu_offload.history import History
from cpu_offload.streaming import CHUNK, RING, Streaming
from ops import load_ops
from ops.cpu import engine, shadow
from ops.cpu.engine import native
from ops.cpu.matrix import NativeExperts
from ops.format import FORMATS, MXFP4, Format
from tests.experts import fill_experts, kind_of
from umbra.errors import UserError

cpu = load_ops("cpu")
KINDS = {k: FORMATS[k] for k in ("float32", "bfloat16", "q8", "q4")} | {
    "f8": Format("f8", 32),
    "mxfp4": MXFP4,
    "w8a8": Format("w8a8", 32),
}
COUNT, INNER, HIDDEN, DECODE = 21, 64, 96, 2


class Layer:
    """The same experts twice, as `ops.moe` takes them and with shadows, and a slot for each."""

    def __init__(self, format: Format, stream_tokens: int):
        kind = kind_of(format)
        self.native = NativeExperts(COUNT, INNER, HIDDEN, format, torch.device("cpu"), kind)
        self.history, self.pool = History(), shadow.ShadowPool([native.Team(-1, 1, [])])
        self.shadowed = CpuExperts(self.pool, 3, slice(0, COUNT), INNER, HIDDEN, format, kind)
        note = self.history.long.append
        self.shadowed.open(Streaming(stream_tokens, self.shadowed.slot_bytes), DECODE, note)
        fill_experts(COUNT, INNER, HIDDEN, kind, self.native, self.shadowed)
        self.slots = self.shadowed.storages[0].view(COUNT, -1).clone()  # one node: blocks as slots have them

    def place(self, resident: list[int]) -> None:
        table = self.shadowed.layer.device
        table.zero_()
        for expert in resident:
            table[expert] = self.slots[expert].data_ptr()


def routing(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weights, ids); some ids are of no expert, some are repeated."""
    ids = torch.stack([torch.randperm(COUNT + 2)[:4] for _ in range(tokens)]) - 1
    ids[0, 0] = ids[0, 1]
    return torch.randn(tokens, HIDDEN), torch.rand(tokens, 4), ids


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Any:
    engine.start(request.param, "auto")
    yield
    engine.start(1, "auto")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("format", KINDS.values(), ids=KINDS)
def test_any_placement_and_size_gives_the_bits_of_moe(format: Format) -> None:
    torch.manual_seed(0)
    random.seed(0)
    threshold = 12
    layer = Layer(format, threshold)
    experts, history = layer.shadowed, layer.history
    counted = torch.zeros(COUNT, dtype=torch.int64)
    for number, tokens in enumerate((1, 2, 3, threshold - 1, threshold, threshold + 1, 40, 40)):
        resident = [[], list(range(COUNT)), random.sample(range(COUNT), random.randrange(COUNT))][number % 3]
        layer.place(resident)
        table = experts.layer.device.clone()
        x, weights, ids = routing(tokens)
        assert torch.equal(experts.mixture(x, weights, ids, None), cpu.moe(x, weights, ids, layer.native, None))
        assert torch.equal(experts.layer.device, table)
        here = ids[(ids >= 0) & (ids < COUNT)].bincount(minlength=COUNT)
        counted += here
        assert torch.equal(experts.layer.counts, counted)
        if tokens <= DECODE:
            assert not history.long
            continue
        missing = {int(i) for i in here.nonzero()} - set(resident)
        found = history.long[-1]
        assert found.tokens == tokens
        assert found.misses == int(here[list(missing)].sum()) if missing else found.misses == 0
        assert found.hits + found.misses == int(here.sum())
        assert found.streamed == (len(missing) * experts.blocks.block_bytes if tokens >= threshold else 0)
        if tokens >= threshold:
            assert not experts.layer.times.any()  # nothing waited for the shadow pool


def test_a_ring_smaller_than_what_is_missing_is_used_again() -> None:
    torch.manual_seed(1)
    layer = Layer(FORMATS["q8"], DECODE + 1)
    assert RING == 2 * CHUNK < COUNT
    assert len(layer.shadowed.streaming.ring) == RING
    for _ in range(20):
        x, weights, ids = routing(30)
        assert torch.equal(layer.shadowed.mixture(x, weights, ids, None), cpu.moe(x, weights, ids, layer.native, None))
    assert all(long.streamed > RING * layer.shadowed.blocks.block_bytes for long in layer.history.long)


def test_streaming_needs_no_shadow_pool_and_never_has_no_ring() -> None:
    torch.manual_seed(2)
    layer, never = Layer(FORMATS["q4"], 3), Layer(FORMATS["q4"], -1)
    assert never.shadowed.streaming.ring.nbytes == 0
    x, weights, ids = routing(3)
    for each in (layer, never):
        each.pool.stop()
    assert torch.equal(layer.shadowed.mixture(x, weights, ids, None), cpu.moe(x, weights, ids, layer.native, None))
    with pytest.raises(UserError, match="the shadow pool was stopped"):
        never.shadowed.mixture(x, weights, ids, None)
