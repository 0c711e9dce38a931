"""Long steps on the CPU, in place and through the ring: the same bits however experts are divided, and the records."""

import dataclasses
import random

import pytest
import torch

from tests.experts import fill_experts, kind_of
from tests.variants import covering
from umbra.base.errors import UserError
from umbra.cpu_offload.costs import Costs, Line
from umbra.cpu_offload.history import History
from umbra.executor.platform.cpu.shadow_device import CpuDevice
from umbra.ops import load_ops
from umbra.ops.cpu import engine, shadow
from umbra.ops.cpu.engine import native
from umbra.ops.cpu.matrix import NativeExperts
from umbra.ops.formats import FORMATS, Format

cpu = load_ops("cpu")
# Layers of one model differ in size, as where some are of more bits.
KINDS = {
    "float32": (FORMATS["float32"],) * 3,
    "bfloat16": (FORMATS["bfloat16"],) * 3,
    "mxfp4": (FORMATS["mxfp4"],) * 3,
    "w8a8": (Format("w8a8", 32),) * 3,
    "q8, q4": (FORMATS["q8"], FORMATS["q4"], FORMATS["q8"]),
}
COUNT, INNER, HIDDEN, TOP_K, DECODE, STREAM = 42, 64, 96, 4, 2, 12
NEVER, FREE = 1e9, 0.0
COSTS = Costs(0.0, Line(0, 0, 0), Line(0, 0.1, 0.01), 0.0, 0.15, 1, (1, 1), 0.0)


class Model:
    """Layers of the same experts twice, as `ops.moe` takes them and with shadows, and a slot for each."""

    def __init__(self, formats: tuple[Format, ...], costs: Costs):
        self.history, self.pool = History(), shadow.ShadowPool([native.Team(-1, 2, [])])
        self.device, kind = CpuDevice(DECODE, TOP_K, STREAM, costs), kind_of(formats[0])
        self.native = [NativeExperts(COUNT, INNER, HIDDEN, f, torch.device("cpu"), kind) for f in formats]
        for number, (format, experts) in enumerate(zip(formats, self.native, strict=True)):
            shadowed = self.device.experts(self.pool, number, slice(0, COUNT), INNER, HIDDEN, format, kind)
            fill_experts(COUNT, INNER, HIDDEN, kind, experts, shadowed)
        self.slots = torch.cat([layer.storages[0] for layer in self.device.layers])
        self.starts = [sum(layer.storages[0].nbytes for layer in self.device.layers[:n]) for n in range(len(formats))]
        self.device.open(self.slots, len(self.slots), self.history.long.append)

    def step(self, tokens: int, layers: list[int]) -> None:
        """Runs layers with random residents and a routing that uses few or many experts, some of them elsewhere."""
        for layer in range(len(self.native)):
            for expert in range(COUNT):
                start = self.starts[layer] + expert * self.device.layers[layer].slot_bytes
                put = self.device.publish if random.random() < 0.25 else lambda id, start: self.device.withdraw(id)
                put((layer, expert), start)
        self.device.begin(int(self.pool.count_step()), (tokens,), (tokens,))
        for layer in layers:
            used = random.randint(TOP_K, COUNT + 2)
            ids = torch.stack([torch.randperm(used)[:TOP_K] for _ in range(tokens)]) - 1
            ids[0, 0] = ids[0, 1]
            x, weights, experts = torch.randn(tokens, HIDDEN), torch.rand(tokens, TOP_K), self.device.layers[layer]
            before, table = experts.layer.counts.clone(), experts.layer.device.clone()
            sums = experts.mixture(x, weights, ids, None)
            assert torch.equal(sums, cpu.moe(x, weights, ids, self.native[layer], None))
            here = ids[(ids >= 0) & (ids < COUNT)].bincount(minlength=COUNT)
            assert torch.equal(experts.layer.counts - before, here)
            assert torch.equal(experts.layer.device, table)
            if tokens > DECODE:
                long = self.history.long[-1]
                assert (long.tokens, long.misses) == (tokens, int(here[table == 0].sum()))
                assert long.hits + long.misses == int(here.sum())
        self.device.finish()


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> object:
    engine.start_teams([native.Team(-1, request.param, [])], "auto", [native.Team(-1, request.param + 1, [])])
    yield
    engine.start(1, "auto")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("kind", "copy"), covering(list(KINDS), [FREE, COSTS.copy, NEVER, None]))
def test_any_split_and_any_wrong_guess_give_the_bits_of_moe(kind: str, copy: float | None) -> None:
    """`copy`: seconds that a byte takes; the values copy all experts, some, none, and use them in place."""
    torch.manual_seed(0)
    random.seed(0)
    whole = Line(0, 1, 1) if copy is None else None
    model = Model(KINDS[kind], dataclasses.replace(COSTS, copy=copy or 0.0, whole=whole))
    for tokens in (1, DECODE, DECODE + 1, STREAM - 1, STREAM, 60, 150, 40, 150):
        model.step(tokens, random.choice([[0, 1, 2], [0, 2], [0, 1, 1, 2]]))
    streamed = [long.streamed > 0 for long in model.history.long if long.tokens >= STREAM]
    assert any(streamed) == (copy in (FREE, COSTS.copy))
    assert model.device.staging_bytes == 0 or copy is not None


def test_a_copy_that_fails_is_an_error_and_the_next_step_ends_in_one_line() -> None:
    torch.manual_seed(0)
    random.seed(0)
    model = Model(KINDS["q8, q4"], dataclasses.replace(COSTS, copy=FREE))
    model.step(60, [0])
    model.device.link.copier.stop()
    for _ in range(2):
        with pytest.raises(UserError, match="the copier was stopped"):
            model.step(60, [0, 1])
    model.device.stream_tokens = 0  # without copies the model still computes
    model.device.finish()
    model.step(60, [0, 1, 2])
