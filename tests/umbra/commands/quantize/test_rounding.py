"""Rounding to 4 bits and AutoAWQ's layout bit by bit; rounding to FP8 against a search through all values of e4m3."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quantised import awq_levels
from umbra.commands.quantize import awq, fp8
from umbra.errors import UserError

GROUP = 32


def words(rows: int, columns: int) -> st.SearchStrategy[torch.Tensor]:
    return st.integers(0, 2**31).map(
        lambda seed: torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed))
    )


@given(st.integers(1, 5).flatmap(lambda rows: st.integers(1, 4).flatmap(lambda n: words(rows, 8 * n))))
def test_packing_puts_every_output_where_the_format_says(values: torch.Tensor) -> None:
    packed = awq.pack(values)
    assert packed.dtype == torch.int32
    assert torch.equal(awq_levels(packed), values.int())
    for row in range(values.shape[0]):
        for j in range(values.shape[1]):
            word = int(packed[row, j // 8]) & 0xFFFFFFFF
            assert word >> [0, 16, 4, 20, 8, 24, 12, 28][j % 8] & 15 == values[row, j]


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-7, 1e-5, 0.02, 1.0, 3000.0]), st.floats(-3, 3))
def test_no_weight_moves_by_more_than_half_a_step(seed: int, size: float, shift: float) -> None:
    weight = (torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) + shift) * size
    weight[0, :32] = 0
    q = awq.quantise(weight, GROUP)
    assert q.scales.dtype == torch.float16
    assert (q.scales > 0).all()
    assert isinstance(q.levels, torch.Tensor)
    assert q.levels.max() <= 15
    half = q.scales.float().repeat_interleave(GROUP, dim=1) / 2
    assert ((q.floats() - weight).abs() <= half * (1 + 1e-5)).all()
    assert torch.equal(q.floats()[0, :32], torch.zeros(32))


def test_a_weight_that_is_not_finite_is_named() -> None:
    for bad in (float("nan"), float("inf"), 2e6):
        weight = torch.ones(8, 32)
        weight[3, 4] = bad
        with pytest.raises(UserError, match=r"a\.q_proj\.weight: holds values that are not finite"):
            awq.packed_linear("a.q_proj", weight, GROUP)


# Every finite e4m3 from the least to the largest, from the definition: 4 bits of exponent with bias 7, 3 of fraction.
POSITIVE = [f / 8 * 2.0**-6 for f in range(8)]
POSITIVE += [(1 + f / 8) * 2.0 ** (e - 7) for e in range(1, 16) for f in range(8) if (e, f) != (15, 7)]
VALUES = torch.tensor([-v for v in reversed(POSITIVE[1:])] + POSITIVE, dtype=torch.float64)


def random(seed: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1e-6, 0.02, 1.0, 3e4, 1e30]), st.floats(0, 9))
def test_every_weight_becomes_the_nearest_value(seed: int, size: float, spread: float) -> None:
    """Blocks of different sizes; within a block, magnitudes that reach far below the smallest normal number."""
    weight = random(seed, 256, 384) * size * torch.exp(spread * random(seed + 1, 256, 384).clamp(-2, 0))
    weight[:128, 128:256] *= 1e-3
    quants, scales = fp8.quantise(weight)
    assert (quants.dtype, quants.shape, scales.dtype) == (torch.float8_e4m3fn, weight.shape, torch.float32)
    for i in range(2):
        for j in range(3):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            assert scales[i, j] == weight[block].abs().max() / 448
            exact = (weight[block] / scales[i, j]).double()
            stored = quants[block].double()
            assert torch.isin(stored, VALUES).all()
            upper = torch.searchsorted(VALUES, exact).clamp(1, len(VALUES) - 1)
            nearest = torch.minimum((VALUES[upper] - exact).abs(), (VALUES[upper - 1] - exact).abs())
            assert torch.equal((stored - exact).abs(), nearest)
            bound = torch.maximum(weight[block].abs() / 16, scales[i, j] / 1024)
            assert ((quants[block].float() * scales[i, j] - weight[block]).abs() <= bound * (1 + 1e-6)).all()


def test_blocks_of_zeros_stay_zeros() -> None:
    weight = random(1, 128, 384)
    weight[:, :128] = 0
    weight[:, 128:256] = 1e-42  # its scale would be no normal number
    quants, scales = fp8.quantise(weight)
    assert scales[0, :2].tolist() == [1, 1]
    assert quants[:, :256].float().count_nonzero() == 0
    assert quants[:, 256:].float().count_nonzero() > 0


def test_a_weight_of_8_bits_that_is_not_finite_is_named() -> None:
    for bad in (float("nan"), float("inf")):
        weight = torch.ones(128, 128)
        weight[3, 4] = bad
        with pytest.raises(UserError, match=r"a\.w1\.weight: holds values that are not finite"):
            fp8.Fp8Target.tensors(None, "a.w1", weight)  # type: ignore[arg-type]
