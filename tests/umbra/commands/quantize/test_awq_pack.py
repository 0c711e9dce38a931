"""Rounding to 4 bits, and AutoAWQ's layout bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quantised import awq_levels
from umbra.commands.quantize.awq import pack, packed_linear, quantise
from umbra.errors import UserError

GROUP = 32


def words(rows: int, columns: int) -> st.SearchStrategy[torch.Tensor]:
    return st.integers(0, 2**31).map(
        lambda seed: torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed))
    )


@given(st.integers(1, 5).flatmap(lambda rows: st.integers(1, 4).flatmap(lambda n: words(rows, 8 * n))))
def test_packing_puts_every_output_where_the_format_says(values: torch.Tensor) -> None:
    packed = pack(values)
    assert packed.dtype == torch.int32
    assert torch.equal(awq_levels(packed), values.int())
    for row in range(values.shape[0]):
        for j in range(values.shape[1]):
            word = int(packed[row, j // 8]) & 0xFFFFFFFF
            assert word >> [0, 16, 4, 20, 8, 24, 12, 28][j % 8] & 15 == values[row, j]


def test_packing_is_autoawqs() -> None:
    """AutoAWQ's WQLinear_GEMM.from_linear fills nibble i of a word with output order_map[i]."""
    values = torch.randint(0, 16, (3, 24), generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(3, 3, dtype=torch.int32)
    for column in range(3):
        for i, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            expected[:, column] |= values[:, column * 8 + output].int() << (i * 4)
    assert torch.equal(pack(values), expected)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-7, 1e-5, 0.02, 1.0, 3000.0]), st.floats(-3, 3))
def test_no_weight_moves_by_more_than_half_a_step(seed: int, size: float, shift: float) -> None:
    weight = (torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) + shift) * size
    weight[0, :32] = 0
    q = quantise(weight, GROUP)
    assert q.scales.dtype == torch.float16
    assert (q.scales > 0).all()
    assert q.levels.max() <= 15
    half = q.scales.float().repeat_interleave(GROUP, dim=1) / 2
    assert ((q.floats() - weight).abs() <= half * (1 + 1e-5)).all()
    assert torch.equal(q.floats()[0, :32], torch.zeros(32))


def test_a_weight_that_is_not_finite_is_named() -> None:
    for bad in (float("nan"), float("inf"), 2e6):
        weight = torch.ones(8, 32)
        weight[3, 4] = bad
        with pytest.raises(UserError, match=r"a\.q_proj\.weight: holds values that are not finite"):
            packed_linear("a.q_proj", weight, GROUP)
