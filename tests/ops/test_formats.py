"""Quantised weights as checkpoints store them: levels, groups, zero points, and levels in words."""

from typing import Any

import pytest
import torch

from umbra.ops.cpu.engine import module
from umbra.ops.formats import SPECS, Format, FormatSpec
from umbra.ops.formats.f8 import F8
from umbra.ops.formats.q4 import Q4
from umbra.ops.formats.q8 import Q8
from umbra.ops.formats.quantised import Quantised, floats
from umbra.ops.formats.rows import in_order
from umbra.ops.words import Words

LEVELS = torch.tensor([[0, 1, 8, 15], [9, 7, 3, 2]], dtype=torch.uint8)
SCALES = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
ZEROS = torch.tensor([[1, 15], [0, 2]], dtype=torch.uint8)


def test_weights_are_levels_less_their_zero_times_the_scale() -> None:
    four = Quantised(Q4, LEVELS, SCALES, None)
    assert four.group == 2
    assert four.floats().tolist() == [[-4.0, -3.5, 0.0, 14.0], [1.0, -1.0, -20.0, -24.0]]
    assert Quantised(Q4, LEVELS, SCALES, ZEROS).floats().tolist() == [[-0.5, 0.0, -14.0, 0.0], [9.0, 7.0, 4.0, 0.0]]
    eight = Quantised(Q8, LEVELS, torch.tensor([[0.5], [2.0]]), None)
    assert eight.floats().tolist() == [[-64.0, -63.5, -60.0, -56.5], [-238.0, -242.0, -250.0, -252.0]]
    signed = Quantised(Q8, torch.tensor([[-128, 0, 127]], dtype=torch.int8), torch.tensor([[2.0]]), None)
    assert signed.plain_levels.tolist() == [[0, 128, 255]]
    assert signed.floats().tolist() == [[-256.0, 0.0, 254.0]]
    floating = Quantised(F8, torch.tensor([[1.5, -2.0]]).to(torch.float8_e4m3fn), torch.tensor([[4.0]]), None)
    assert floating.floats().tolist() == [[6.0, -8.0]]
    assert floating.plain_levels.dtype == torch.float8_e4m3fn
    assert (four.plain_zeros, Quantised(Q4, LEVELS, SCALES, ZEROS).plain_zeros is ZEROS) == (None, True)


def levels(spec: FormatSpec, group: int, zeros: bool) -> Quantised:
    kind = torch.float8_e4m3fn if spec is F8 else torch.uint8
    points = torch.zeros(1, 128 // group, dtype=torch.uint8) if zeros else None
    return Quantised(spec, torch.zeros(1, 128, dtype=torch.uint8).view(kind), torch.ones(1, 128 // group), points)


def test_every_format_has_a_row_of_kernel_traits() -> None:
    assert {*module.format_names()} == {*SPECS, "expanded"}  # which no matrix has


@pytest.mark.parametrize(
    ("part", "format", "fits"),
    [
        (levels(Q4, 64, False), Format("q4", 64), True),
        (levels(Q4, 64, False), Format("q4", 32), True),
        (levels(Q4, 32, False), Format("q4", 64), False),
        (levels(Q4, 64, False), Format("q4", 64, True), True),
        (levels(Q4, 64, True), Format("q4", 64, True), True),
        (levels(Q4, 64, True), Format("q4", 64), False),
        (levels(Q8, 64, False), Format("q4", 64), False),
        (levels(Q8, 64, False), Format("q8", 64), True),
        (levels(Q4, 64, False), Format("q8", 64), False),
        (levels(F8, 128, False), Format("f8", 128), True),
        (levels(F8, 128, False), Format("q8", 128), False),
        (levels(Q8, 64, False), Format("float32"), False),
        (levels(Q8, 64, False), Format("q8", 0), False),
    ],
)
def test_which_formats_keep_levels_unchanged(part: Quantised, format: Format, fits: bool) -> None:
    assert part.fits(format) is fits


def test_groups_can_be_cut_into_smaller_ones() -> None:
    part = Quantised(Q4, LEVELS, torch.tensor([[0.5], [2.0]]), torch.tensor([[1], [3]], dtype=torch.uint8))
    scales, zeros = part.in_groups(2)
    assert scales.tolist() == [[0.5, 0.5], [2.0, 2.0]]
    assert zeros is not None
    assert zeros.tolist() == [[1, 1], [3, 3]]
    scales, zeros = Quantised(Q4, LEVELS, SCALES, None).in_groups(1)
    assert (scales.tolist(), zeros) == ([[0.5, 0.5, 2.0, 2.0], [1.0, 1.0, 4.0, 4.0]], None)


def test_rows_can_be_put_in_another_order() -> None:
    turned: Any = in_order(Quantised(Q4, LEVELS, SCALES, ZEROS), [1, 0])
    assert (turned.spec, turned.plain_levels.tolist()) == (Q4, LEVELS.flip(0).tolist())
    assert (turned.scales.tolist(), turned.zeros.tolist()) == (SCALES.flip(0).tolist(), ZEROS.flip(0).tolist())
    without: Any = in_order(Quantised(Q4, LEVELS, SCALES, None), [1, 0])
    assert without.zeros is None
    plain = torch.tensor([[1.0], [2.0], [3.0]])
    rows: Any = in_order(plain, [2, 0, 1])
    assert rows.tolist() == [[3.0], [1.0], [2.0]]
    assert floats(plain) is plain
    assert torch.equal(floats(turned), turned.floats())


def words_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def test_words_hold_neighbours_of_a_row_the_first_in_the_lowest_bits() -> None:
    four = Words(words_of([0x76543210, 0x0FEDCBA9]), 4)
    assert four.shape == (1, 16)
    assert four.unpacked().tolist() == [[*range(8), *range(9, 16), 0]]
    eight = Words(words_of([0x04030201, 0x7F060500]), 8)
    assert (eight.shape, eight.unpacked().tolist()) == ((1, 8), [[1, 2, 3, 4, 0, 5, 6, 127]])
    assert not four.is_floating_point()
    assert Words(words_of([-1]), 4).unpacked().tolist() == [[15] * 8]
    column = Words(words_of([0x76543210, 7]).T.contiguous().T, 4)  # of any strides
    assert column.unpacked().tolist() == [[*range(8), 7, *[0] * 7]]


def test_words_can_hold_neighbours_of_a_column_in_an_order() -> None:
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    words = Words(words_of([0x76543210, 0x00000010]), 4, order)
    assert words.shape == (8, 2)
    assert words.unpacked().T.tolist() == [[*order], [0, 0, 1, 0, 0, 0, 0, 0]]
    two = Words(words_of([1], [2]), 4, order)
    assert two.shape == (16, 1)
    assert two.unpacked().flatten().tolist() == [1, *[0] * 7, 2, *[0] * 7]


def test_a_part_of_words_is_unpacked_only_where_it_is_less_than_all() -> None:
    words = Words(words_of([0x76543210], [0x01234567]), 4)
    assert words.rows(slice(0, 2)) is words
    assert words.columns(slice(0, 8)) is words
    for part in (slice(0, 1), slice(1, 2)):
        rows: Any = words.rows(part)
        assert rows.tolist() == words.unpacked()[part].tolist()
    for part in (slice(0, 7), slice(1, 8), slice(2, 5)):
        columns: Any = words.columns(part)
        assert columns.tolist() == words.unpacked()[:, part].tolist()
