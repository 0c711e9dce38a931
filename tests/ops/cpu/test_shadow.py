"""Shadow experts: the same bits for every placement, tables that change between replays, and errors after faults."""

import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.experts import fill_experts, kind_of
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.ops import load_ops
from umbra.ops.cpu import engine, shadow
from umbra.ops.cpu.engine import native
from umbra.ops.cpu.matrix import NativeExperts, write_bias
from umbra.ops.formats import FORMATS, Format

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")
MANY = 128 if SANITIZED else 1024  # tokens; AddressSanitizer's code is many times slower
cpu = load_ops("cpu")
KINDS = {k: FORMATS[k] for k in ("float32", "bfloat16", "q8", "q4")} | {
    "q4 zeros": Format("q4", 64, zeros=True),
    "mxfp4": FORMATS["mxfp4"],
    "w8a8": Format("w8a8", 32),
}


def teams(*threads: int) -> list[native.Team]:
    return [native.Team(-1, count, []) for count in threads]


@pytest.fixture(params=[((1,), (1,)), ((1, 2), (2, 1, 1))], ids=["1 1", "1+2 2+1+1"])
def pool(request: pytest.FixtureRequest) -> Iterator[shadow.ShadowPool]:
    device, other = request.param
    engine.start_teams(teams(*device), "auto")
    yield shadow.ShadowPool(teams(*other))
    engine.start(1, "auto")


class Model:
    """One layer's experts three times: all-resident as ops.moe takes them, in the store, and room for all in slots."""

    def __init__(self, format: Format, count: int = 8, inner: int = 64, hidden: int = 192, first: int = 0):
        kind = kind_of(format)
        self.experts = NativeExperts(count, inner, hidden, format, CPU, kind)
        self.blocks, self.first = shadow.ExpertBlocks(inner, hidden, format, kind), first
        size = self.blocks.block_bytes
        buffers = [native.Buffer(count * size, 0) for _ in range(2)]
        self.store, self.slots = (torch.frombuffer(b, dtype=torch.uint8).view(count, size) for b in buffers)
        fill_experts(count, inner, hidden, kind, self.experts, self)
        self.addresses = torch.tensor([x.data_ptr() for x in self.store])
        device, counts, hits, times = (torch.zeros(n, dtype=torch.int64) for n in (count, count, 1, 4))
        self.layer = shadow.ShadowLayer(3, self.blocks, self.addresses, device, counts, hits, times, self.store, first)

    def fill(self, expert: int, which: str, part: Tensor) -> None:
        self.blocks.fill(self.store[expert].data_ptr(), which, part)

    def fill_bias(self, expert: int, which: str, part: Tensor) -> None:
        name, row, step = self.blocks.rows_of(which)
        start, size = self.blocks.offsets[name][3], self.blocks.planes(name, self.blocks.shapes[name][0])[3]
        write_bias([self.store[expert][start : start + size].view(torch.float32)], row, part, step)

    def make_resident(self, resident: list[int]) -> None:
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


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 8), (2, 3), (40, 4), (40, 8)])
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
        model.make_resident(resident)
        expected = model.expected(x, weights, ids)
        assert torch.equal(model.moe(pool, x, weights, ids), expected)
        tape.replay()
        assert torch.equal(captured, expected)
        x.copy_(torch.randn(x.shape))
        weights[:], ids[:] = routing(tokens, top_k, 8)
    assert len(tape.records) == records == 3


def test_routing_is_counted_and_nobody_waits_where_all_are_resident(pool: shadow.ShadowPool) -> None:
    torch.manual_seed(0)
    model = Model(FORMATS["q4"], first=2)
    x, (weights, ids) = torch.randn(30, 192), routing(30, 5, 8)
    model.make_resident(list(range(8)))
    for _ in range(2):
        model.moe(pool, x, weights, ids)
    here = ids[(ids >= 2) & (ids < 10)] - 2
    assert torch.equal(model.layer.counts, 2 * here.bincount(minlength=8))
    assert model.layer.hits == 2 * len(here)
    assert model.layer.times.tolist() == [0, 0, 0, 0]
    model.make_resident([])
    model.moe(pool, x, weights, ids)
    assert torch.equal(model.layer.counts, 3 * here.bincount(minlength=8))
    assert model.layer.hits == 2 * len(here)
    assert int(model.layer.times.min()) > 0


def test_copies_that_arrive_within_a_step_count_in_it(pool: shadow.ShadowPool) -> None:
    torch.manual_seed(0)
    random.seed(0)
    copier, model = shadow.Copier(), Model(FORMATS["q4"], first=2)
    arrived, size, coming = torch.zeros(8, dtype=torch.int64), model.blocks.block_bytes, list[int]()
    layer = model.layer = replace(model.layer, arrived=arrived)
    x, (weights, ids) = torch.randn(9, 192), routing(9, 3, 8)

    def copy() -> None:
        free = [slot for slot in model.slots if not (layer.device == slot.data_ptr()).any()]
        for e, slot in zip(coming, free, strict=False):
            source = shadow.Pieces(model.store[e].data_ptr(), [(0, 0, size)], size, model.store)
            copier.wait(copier.fill(slot.data_ptr(), source, arrived.data_ptr() + 8 * e))

    tape = engine.Tape()
    with tape.capture():
        before = model.moe(pool, x, weights, ids)
        engine.host(copy)
        after = model.moe(pool, x, weights, ids)
    for resident in placements(8):
        model.make_resident(resident)
        arrived.zero_()
        coming[:] = [e for e in range(8) if e not in resident and random.random() < 0.7]
        layer.hits.zero_()
        tape.replay()
        pairs, expected = [(ids == e + 2).sum() for e in range(8)], model.expected(x, weights, ids)
        assert torch.equal(before, expected)
        assert torch.equal(after, expected)
        assert layer.hits == 2 * sum(pairs[e] for e in resident) + sum(pairs[e] for e in coming)


def test_ten_thousand_replays_of_one_tape_while_experts_move() -> None:
    """Slots are fewer than experts; a copier fills them while steps run, tables change between steps."""
    torch.manual_seed(0)
    random.seed(0)
    pool, copier, model = shadow.ShadowPool(teams(1)), shadow.Copier(), Model(FORMATS["q4"], inner=32, hidden=64)
    variants = []
    for _ in range(50):
        x, (weights, ids) = torch.randn(4, 64), routing(4, 2, 8)
        variants.append((x, weights, ids, model.expected(x, weights, ids)))
    x, weights, ids = (torch.empty_like(t) for t in variants[0][:3])
    x.zero_(), weights.zero_(), ids.zero_()
    tape = engine.Tape()
    with tape.capture():
        out = model.moe(pool, x, weights, ids)
    device, free, slot_of, moves = model.layer.device, list(range(4)), {}, 0
    coming: tuple[int, int, int] | None = None
    for step in range(10_000):
        pool.step.add_(1)
        if coming and copier.done(coming[0]):
            _, expert, slot = coming
            device[expert], slot_of[expert], coming = model.slots[slot].data_ptr(), slot, None
            moves += 1
        if slot_of and (not free or random.random() < 0.1):
            expert = random.choice(list(slot_of))
            device[expert] = 0
            free.append(slot_of.pop(expert))
        if free and not coming:
            expert = random.choice([e for e in range(8) if e not in slot_of])
            slot = free.pop(0)
            coming = copier.submit(model.slots[slot], model.store[expert]), expert, slot
        *inputs, expected = variants[step % 50]
        for tensor, value in zip((x, weights, ids), inputs, strict=True):
            tensor.copy_(value)
        tape.replay()
        assert torch.equal(out, expected), step
    assert moves > 500
    assert len(tape.records) == 3


def heavy(tokens: int = MANY) -> tuple[Model, Tensor, Tensor, Tensor]:
    """Work of some 60 milliseconds or more, all for the shadow pool."""
    model = Model(FORMATS["float32"], count=8, inner=512, hidden=512)
    weights, ids = torch.rand(tokens, 8), torch.stack([torch.randperm(8) for _ in range(tokens)])
    return model, torch.randn(tokens, 512), weights, ids


def test_the_watchdog_names_layer_and_step() -> None:
    """The time-out also proves that submit does not wait for the work. Afterwards the pool works again."""
    model, x, weights, ids = heavy()
    pool = shadow.ShadowPool(teams(1), timeout=0.001)
    pool.step.fill_(17)
    job = shadow.submit(pool, model.layer, x, ids)
    with pytest.raises(UserError, match=r"^shadow experts: layer 3, step 17: not done after 0.001 s$"):
        shadow.join(job, weights)
    del job  # what the work still writes must live on
    gc.collect()
    for _ in range(3000):
        try:
            few = model.moe(pool, x[:1], weights[:1], ids[:1].clone())
            break
        except UserError:
            time.sleep(0.01)
    assert torch.equal(few, model.expected(x[:1], weights[:1], ids[:1]))


def test_a_stopped_pool_fails_at_once_and_names_layer_and_step() -> None:
    model, x, weights, ids = heavy()
    pool = shadow.ShadowPool(teams(2))
    job = shadow.submit(pool, model.layer, x, ids)
    pool.stop()  # what it has is finished
    expected = model.expected(x, weights, ids)
    assert torch.equal(shadow.join(job, weights), expected)
    pool.step.fill_(5)
    with pytest.raises(UserError, match=r"^shadow experts: layer 3, step 5: the shadow pool was stopped$"):
        shadow.submit(pool, model.layer, x, ids)
    model.make_resident(list(range(8)))  # who needs no shadow is not disturbed
    assert torch.equal(model.moe(pool, x, weights, ids), expected)


def test_a_step_that_ended_between_submit_and_join_is_harmless() -> None:
    model, x, weights, ids = heavy(tokens=64)
    pool, fail = shadow.ShadowPool(teams(1)), [False]

    def between() -> None:
        if fail[0]:
            raise RuntimeError("no more")

    tape = engine.Tape()
    with tape.capture():
        job = shadow.submit(pool, model.layer, x, ids)
        engine.host(between)
        shadow.resident_rows(job)
        out = shadow.join(job, weights)
    for fail[0] in (True, False, True, True, False):
        x.copy_(torch.randn(x.shape))
        if fail[0]:
            with pytest.raises(RuntimeError, match="no more"):
                tape.replay()
        else:
            tape.replay()
            assert torch.equal(out, model.expected(x, weights, ids))


def test_an_expert_that_is_nowhere_is_an_error_not_zeros() -> None:
    torch.manual_seed(0)
    model, pool = Model(FORMATS["q8"]), shadow.ShadowPool(teams(1))
    model.layer.store[5] = 0
    with pytest.raises(UserError, match="layer 3, step 0: expert 5 is neither resident nor in the shadow store"):
        shadow.submit(pool, model.layer, torch.randn(1, 192), torch.tensor([[2, 5]]))


def test_the_end_comes_at_any_time() -> None:
    """Unused, at work, abandoned at work, at exit; in a process of its own, so that a crash or a hang is seen."""
    code = """
from tests.ops.cpu.test_shadow import heavy, shadow, teams
shadow.ShadowPool(teams(3))
for timeout in (30, 0.001):
    model, x, weights, ids = heavy()
    pool = shadow.ShadowPool(teams(2), timeout)
    job = shadow.submit(pool, model.layer, x, ids)
    del job, pool, model, x, weights, ids
model, x, weights, ids = heavy()
pool = shadow.ShadowPool(teams(2))
job = shadow.submit(pool, model.layer, x, ids)
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-2000:]


@pytest.mark.parametrize("format", KINDS.values(), ids=KINDS)
def test_a_block_is_a_packed_expert(format: Format) -> None:
    """A block has one node's NativeExperts, plane by plane; planes begin at multiples of 64."""
    torch.manual_seed(0)
    engine.start(1, "auto")
    inner, hidden = (48, 40) if not format.group else (64, 192)  # padding in float formats
    model = Model(format, count=1, inner=inner, hidden=hidden)
    packed = torch.cat([*model.experts.w13.storages, *model.experts.w2.storages])
    assert torch.equal(packed, model.store[0])
    assert all(offset % 64 == 0 for offsets in model.blocks.offsets.values() for offset in offsets)
    for which in ("gate", "up", "down"):
        stored = model.blocks.dequantised(int(model.addresses[0]), which)
        assert torch.equal(stored, model.experts.dequantised(0, which))


def test_impossible_blocks_are_named() -> None:
    with pytest.raises(UserError, match="quantization: an expert's 80 columns cannot be cut into groups of 32"):
        shadow.ExpertBlocks(80, 64, FORMATS["q4"])


def test_copies_are_made_in_order_and_tell() -> None:
    copier, source = shadow.Copier(), torch.randint(256, (50, 1 << 16), dtype=torch.uint8)
    to = torch.zeros_like(source)
    tickets = [copier.submit(to[i], source[i]) for i in range(50)]
    copier.wait(tickets[20])
    assert torch.equal(to[:21], source[:21])
    assert all(copier.done(t) for t in tickets[:21])
    copier.wait(tickets[-1])
    assert torch.equal(to, source)
    with pytest.raises(ValueError, match="a copy of 7 bytes to 8"):
        copier.submit(to[0, :8], source[0, :7])


def test_a_stopped_copier_tells_what_it_did_not_do() -> None:
    copier, source = shadow.Copier(), torch.randint(256, (64 << 20,), dtype=torch.uint8)
    to = torch.zeros_like(source)
    tickets = [copier.submit(to, source) for _ in range(20)]
    copier.stop()
    with pytest.raises(UserError, match=f"^expert copies: the copier was stopped before copy {tickets[-1]}$"):
        copier.wait(tickets[-1])
    with pytest.raises(UserError, match="stopped before copy"):
        copier.done(tickets[-1])
    with pytest.raises(UserError, match=r"^expert copies: the copier was stopped$"):
        copier.submit(to, source)
    to.zero_()  # nothing is written any more
    assert not to.any()
