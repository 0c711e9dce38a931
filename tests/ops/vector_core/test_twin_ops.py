"""The twin's instructions against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.ascend_c import run
from tests.ops.vector_core.test_twin import probes

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

TYPES: dict[str, Any] = {"half": torch.half, "bfloat16_t": torch.bfloat16, "float": torch.float32}
TYPES |= {"int16_t": torch.int16, "int32_t": torch.int32, "uint16_t": torch.uint16}


def random(dtype: torch.dtype, seed: int, scale: float = 3.0) -> Tensor:
    """4096 bytes."""
    generator = torch.Generator().manual_seed(seed)
    count = 4096 // torch.empty((), dtype=dtype).element_size()
    if dtype.is_floating_point:
        return (torch.randn(count, generator=generator) * scale).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, (count,), generator=generator, dtype=torch.int64).to(dtype)


def op(name: str, a: Tensor, d: Tensor, b: Tensor | None = None) -> Tensor:
    outputs = {"y": ((d.numel(),), d.dtype)}
    given = {"a": a, "b": random(torch.half, 2) if b is None else b, "d": d}
    return run(probes("ops"), name, given, outputs, b"", cores=1)[0]["y"]


def equal(ours: Tensor, wanted: Tensor) -> None:
    assert ours.dtype == wanted.dtype
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0, equal_nan=True)


def nibbles(packed: Tensor) -> Tensor:
    pairs = torch.stack([packed & 15, packed >> 4 & 15], -1).reshape(-1).to(torch.int64)
    return torch.where(pairs > 7, pairs - 16, pairs)


def test_cast_int4() -> None:
    packed, d = random(torch.uint8, 1), random(torch.half, 3)
    equal(op("cast_int4", packed, d), nibbles(packed)[:2048].half())
    # 4 repeats of 128 nibbles, 64 bytes in every 128, to 8 blocks with a block between
    wanted = d.clone().view(4, 16, 2, 16)[:, :8]
    blocks = nibbles(packed).view(-1, 64)[torch.tensor([[0, 1], [4, 5], [8, 9], [12, 13]])]  # (4, 2, 64)
    wanted = d.clone()
    for repeat in range(4):
        for block in range(8):
            at = (repeat * 16 + block * 2) * 16
            wanted[at : at + 16] = blocks[repeat].reshape(8, 16)[block].half()
    equal(op("cast_int4_strides", packed, d), wanted)


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The nearest values of `dtype` not above and not below x, found by search among all of them."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).double()
    every = every[every.isfinite()].unique()
    above = torch.searchsorted(every, x)
    exact = every[above] == x
    return every[torch.where(exact, above, above - 1)], every[above]


@pytest.mark.parametrize("mode", ["rint", "floor", "ceil", "round", "trunc"])
@pytest.mark.parametrize("name", ["half", "bfloat16_t", "int32_t", "int16_t", "float"])
def test_rounding(name: str, mode: str) -> None:
    dtype = TYPES[name]
    x = random(torch.float32, 5, 100.0)
    x[:512] = torch.arange(-128, 128).repeat_interleave(2)[:512] / 2  # ties of whole numbers
    x[512:640] = 2048 + torch.arange(128)  # ties of half, and of bfloat16
    exact = x.double()
    if name in ("half", "bfloat16_t"):
        low, high = neighbours(exact, dtype)
    else:
        low, high = exact.floor(), exact.ceil()
    half_way = (low + high) / 2
    away = torch.where(exact > 0, high, low)
    toward = torch.where(exact > 0, low, high)
    nearest = torch.where(exact < half_way, low, torch.where(exact > half_way, high, away))
    wanted = {
        "floor": low,
        "ceil": high,
        "trunc": toward,
        "round": nearest,
        "rint": exact.to(dtype).double() if name in ("half", "bfloat16_t") else exact.round(),
    }[mode]
    d = random(dtype, 1)
    rounded = op(f"cast_to_{name}_{mode}", x, d)
    assert torch.equal(rounded[:1024].double(), wanted)


def test_strides() -> None:
    a, b, d = (random(torch.float32, seed) for seed in (1, 2, 3))
    wanted = d.clone()
    for repeat in range(3):
        for lane in range(40):
            block, inside = divmod(lane, 8)
            wanted[(repeat * 16 + block * 2) * 8 + inside] = (
                a[repeat * 8 * 8 + inside] * b[(repeat * 5 + block) * 8 + inside]
            )
    equal(op("mul_strides", a, d, b), wanted)


def test_multiply_add() -> None:
    a, b = random(torch.half, 1), random(torch.half, 2)
    d, wide = random(torch.half, 3), random(torch.float32, 3)
    equal(op("sum_half", a, d, b), d + a * b)  # torch rounds each to half
    x, y = random(torch.float32, 1), random(torch.float32, 2)
    equal(op("sum_float", x, wide, y), wide + x * y)
    equal(op("sum_mixed", a, wide, b), wide + a[:1024].float() * b[:1024].float())
    # 20 repeats of 64 products: a goes on, b's repeat is one block of 16 taken four times
    wanted = wide.clone()
    for repeat in range(20):
        factor = b[repeat * 16 : repeat * 16 + 16].float().repeat(4)
        wanted[:64] += a[repeat * 64 : repeat * 64 + 64].float() * factor
    equal(op("sum_chained", a, wide, b), wanted)
    scalar = torch.tensor(0.3).half()
    equal(op("axpy", a, wide), wide + a[:1024].float() * scalar.float())
    wanted = d.clone()
    for repeat in range(4):
        wanted[:128] = wanted[:128] + a[repeat * 128 : repeat * 128 + 128] * scalar
    equal(op("axpy_half", a, d), wanted)


def test_fills() -> None:
    brains, halves, floats = random(torch.bfloat16, 1), random(torch.half, 1), random(torch.float32, 1)
    wanted = brains.clone()
    for repeat in range(3):
        wanted[repeat * 64 : repeat * 64 + 16] = 1.5
    equal(op("duplicate", halves, brains), wanted)
    d = random(torch.half, 3)
    wanted = d.clone()
    for element in range(24):
        at = (element // 8 * 20 + element % 8 * 2) * 16
        wanted[at : at + 16] = halves[element]
    equal(op("brcb_half", halves, d), wanted)
    wide = random(torch.float32, 3)
    equal(op("brcb_float", floats, wide)[:128], floats[:16].repeat_interleave(8))


def tree(lanes: Tensor) -> Tensor:
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


def test_reductions() -> None:
    a, d = random(torch.float32, 1), random(torch.float32, 3)
    wanted = d.clone()
    for repeat in range(4):
        lanes = torch.zeros(64)
        lanes[:60] = a[repeat * 72 : repeat * 72 + 60]
        wanted[3 + 2 * repeat] = tree(lanes)
    equal(op("whole_sum", a, d), wanted)
    halves, narrow = random(torch.half, 1), random(torch.half, 3)
    equal(op("whole_sum_half", halves, narrow)[:16], tree(halves.view(16, 128)))
    a[7] = a[9] = 100  # the first of the largest counts
    reduced = op("whole_max", a, d)
    for repeat in range(4):
        lanes = a[repeat * 64 : repeat * 64 + 50]
        assert reduced[6 * repeat] == lanes.max()
        assert reduced[6 * repeat + 1].view(torch.int32) == lanes.argmax()
        equal(reduced[6 * repeat + 2 : 6 * repeat + 6], d[6 * repeat + 2 : 6 * repeat + 6])
    assert reduced[1].view(torch.int32) == 7
    equal(op("whole_max_only", halves, narrow)[:4], halves.view(-1, 128)[:4].amax(1))
    wanted = d.clone()
    for repeat in range(4):  # 44 lanes: five blocks and a half; the last two keep what was there
        lanes = torch.zeros(48)
        lanes[:44] = a[repeat * 64 : repeat * 64 + 44]
        wanted[repeat * 16 : repeat * 16 + 6] = tree(lanes.view(6, 8))
    equal(op("block_sum", a, d), wanted)
    equal(op("block_sum_half", halves, narrow)[:128], tree(halves.view(128, 16)))


def test_block_max() -> None:
    a, d = random(torch.float32, 1), random(torch.float32, 2)
    wanted = d.clone()
    for repeat in range(4):
        for block in range(6):
            first = repeat * 64 + block * 8
            wanted[repeat * 16 + block] = a[first : min(first + 8, repeat * 64 + 44)].max()
    equal(op("block_max", a, d), wanted)


def test_squares_are_transposed() -> None:
    """Two repeats: the second reads 32 blocks on, and writes one block on."""
    a, d = random(torch.half, 1), random(torch.half, 2)
    wanted = d.clone()
    for repeat in range(2):
        square = torch.stack([a[512 * repeat + 16 * (15 - i) :][:16] for i in range(16)])
        for i in range(16):
            wanted[48 * i + 16 * repeat :][:16] = square[:, i]
    equal(op("squares", a, d), wanted)


def test_sorted_lists() -> None:
    """Larger scores first, of equal ones the first; NaN last."""
    scores, d = random(torch.float32, 1).round(), random(torch.float32, 2)
    scores[5], scores[40], scores[41] = float("nan"), float("inf"), float("-inf")
    payloads = torch.arange(1024, dtype=torch.int32)
    sorted_lists = op("sort32", scores, d, payloads).view(16, 32, 2)
    order = (
        scores[:512]
        .view(16, 32)
        .nan_to_num(nan=-2e30, posinf=1e30, neginf=-1e30)
        .sort(dim=-1, descending=True, stable=True)
        .indices
    )
    equal(sorted_lists[..., 1].contiguous().view(torch.int32), (order + 32 * torch.arange(16)[:, None]).int())
    equal(sorted_lists[..., 0], scores[:512].view(16, 32).gather(1, order))

    pairs = torch.zeros(512, 2)
    for begin, length in ((0, 8), (32, 32), (64, 5)):
        pairs[begin : begin + length, 0] = random(torch.float32, begin)[:length].round().sort(descending=True).values
        pairs[begin : begin + length, 1] = torch.arange(begin, begin + length)
    lists = torch.cat([pairs[:8], pairs[32:64], pairs[64:69]])
    wanted = d.clone()
    wanted[:90] = lists[lists[:, 0].sort(dim=0, descending=True, stable=True).indices].flatten()
    equal(op("merge3", pairs.flatten(), d), wanted)


def test_elements_are_gathered() -> None:
    bits, d = random(torch.int32, 1), random(torch.int32, 2)
    wanted = d.clone()
    wanted[:24] = bits.view(-1, 64)[:3, 1:16:2].flatten()
    equal(op("gather_odd", bits, d), wanted)
    a, wide = random(torch.float32, 1), random(torch.float32, 2)
    expected = wide.clone()
    expected[:10] = torch.cat([a[0:10:2], a[16:26:2]])
    equal(op("gather_even", a, wide), expected)
    places = torch.randint(0, 1000, (1024,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    expected = wide.clone()
    expected[:70] = a[places[:70] + 2]
    equal(op("gather", a, wide, places * 4), expected)
