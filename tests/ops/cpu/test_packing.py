"""Rows of every kind that checkpoints store, packed into every format: bit for bit what PyTorch gives."""

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.quantised import nested
from umbra.base.errors import UserError
from umbra.executor.checkpoint.formats.awq import ORDER
from umbra.ops.cpu.matrix import NativeExperts, NativeMatrix
from umbra.ops.cpu.memory import table
from umbra.ops.cpu.ops import fill_table
from umbra.ops.formats import FORMATS, GROUP_SIZES, INTEGERS, SPECS, Format
from umbra.ops.formats.f8 import F8
from umbra.ops.formats.quantised import Quantised
from umbra.ops.formats.rows import every_other, in_order
from umbra.ops.words import Words

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ROWS, COLUMNS = 45, 256  # neither rows of a block, nor a power of two of them
BASIC = {kind: FORMATS[kind] for kind in ("float32", "bfloat16", "float16", "q8", "q4")}
WHOLE = [Format("q8", 32), Format("q8", 128), *(Format("q4", g, z) for g in GROUP_SIZES for z in (False, True))]


def stored(matrix: NativeMatrix) -> Tensor:
    return torch.cat(matrix.storages)


def filled(format: Format, *parts: tuple[int, Any], columns: int = COLUMNS) -> Tensor:
    """All bytes of a matrix whose rows `row` on are the part, for each (row, part); and whether all were finite."""
    matrix = NativeMatrix(ROWS + 8, columns, format, CPU)
    finite = [matrix.fill(row, part) for row, part in parts]
    return torch.cat([stored(matrix), torch.tensor([all(finite)], dtype=torch.uint8)])


def quantised(w: Tensor, format: Format) -> Quantised:
    """`w` in levels, by the formulas of csrc/kernels/pack.h."""
    bits = {"q8": 8, "q4": 4}[format.kind]
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    groups = w.float().unflatten(1, (-1, format.group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if format.zeros:
        exact = (high - low) / top
    elif bits == 8:
        exact = torch.where(high < -low, -low, high) / 127  # not maximum: -0
    else:
        exact = torch.where(high > -low, high, low) / -8
    scales = exact.half()
    inverse = torch.where(scales == 0, 0, 1 / scales.float())
    zeros = (-low * inverse).round().clamp(0, top) if format.zeros else torch.full_like(low, middle)
    levels = ((groups * inverse[..., None]).round() + zeros[..., None]).clamp(0, top).flatten(1).to(torch.uint8)
    return Quantised(format.spec, levels, scales, zeros.to(torch.uint8) if format.zeros else None)


def weights(dtype: torch.dtype) -> Tensor:
    """Small and large, with zeros and with ties of rounding."""
    w = torch.randn(ROWS, COLUMNS) * torch.logspace(-6, 2, ROWS)[:, None]
    w[3], w[4], w[5, :7] = 0, torch.arange(COLUMNS) / 16, -0.0
    w[6] = (torch.arange(COLUMNS) % 15 - 7) / 2
    return w.to(dtype)


@pytest.mark.parametrize("format", WHOLE, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_become_the_nearest_levels(dtype: torch.dtype, format: Format) -> None:
    torch.manual_seed(0)
    w = weights(dtype)
    assert torch.equal(filled(format, (3, w)), filled(format, (3, quantised(w, format))))
    pieces = [(3 + row, w[row : row + 7]) for row in range(0, ROWS, 7)]
    assert torch.equal(filled(format, *pieces), filled(format, (3, w)))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [1, 35, COLUMNS])
def test_floats_are_rounded_as_pytorch_rounds(dtype: torch.dtype, kind: str, columns: int) -> None:
    """Also the columns of a rank's part, which are not contiguous, at any alignment."""
    torch.manual_seed(1)
    w = weights(dtype)
    for start in (0, COLUMNS - columns, max(0, 7 - columns)):
        matrix = NativeMatrix(ROWS, columns, FORMATS[kind], CPU)
        assert matrix.fill(0, w[:, start : start + columns])
        expected = w[:, start : start + columns].to(getattr(torch, kind)).float()
        assert torch.equal(matrix.packed.dequantised(0, ROWS), expected)


def test_a_column_of_halves_whose_rows_are_a_word_apart() -> None:
    part = torch.arange(2.0 * ROWS, dtype=torch.bfloat16).view(ROWS, 2)[:, :1]
    matrix = NativeMatrix(ROWS, 1, FORMATS["float32"], CPU)
    matrix.fill(0, torch.full((ROWS, 1), 7.0))  # what the stack still holds
    matrix.fill(0, part)
    assert torch.equal(matrix.packed.dequantised(0, ROWS), part.float())


def packed_in_words(levels: Tensor, bits: int, order: tuple[int, ...] | None) -> Words:
    """`levels` with the neighbours of a row, or with `order` those of a column, in each word."""
    along = levels.T if order else levels
    parts = along.unflatten(1, (-1, 32 // bits)).long()
    words = sum(parts[..., j] << bits * (order[j] if order else j) for j in range(32 // bits))
    assert isinstance(words, Tensor)
    words = torch.where(words < 1 << 31, words, words - (1 << 32)).int()
    return Words(words.T if order else words, bits, order)


def transposed(words: Words) -> Words:
    """The same words where columns follow one another in memory, as GPTQ has them."""
    return Words(words.words.T.contiguous().T, words.bits)


WAYS: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
    "awq": (4, lambda levels: packed_in_words(levels, 4, ORDER)),
    "gptq": (4, lambda levels: transposed(packed_in_words(levels, 4, None))),
    "gptq 8": (8, lambda levels: transposed(packed_in_words(levels, 8, None))),
    "pack-quantized": (4, lambda levels: packed_in_words(levels, 4, None)),
    "pack-quantized 8": (8, lambda levels: packed_in_words(levels, 8, None)),
    "int8": (8, lambda levels: (levels ^ 128).view(torch.int8)),
}


@pytest.mark.parametrize("zeros", [None, "bytes", "words"])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("way", WAYS)
def test_levels_are_taken_as_they_are_stored(way: str, group: int, zeros: str | None) -> None:
    """Kept where they fit, also in smaller groups, else as the floats that they mean; in pieces that begin anywhere."""
    torch.manual_seed(2)
    bits, pack = WAYS[way]
    if zeros == "words" and bits == 8:
        return  # AWQ's zero points only
    levels = torch.randint(1 << bits, (48, COLUMNS), dtype=torch.uint8)
    points = None if zeros is None else torch.randint(1 << bits, (48, COLUMNS // group), dtype=torch.uint8)
    scales = torch.rand(COLUMNS // group, 48).to(torch.bfloat16 if group == 32 else torch.float16).T
    formats = [Format("q4", 32), Format("q4", 32, True), Format("q8", 32), Format("q4", 128, True), *BASIC.values()]
    for first, end in ((0, 48), (0, 16), (8, 24), (16, 40)):
        part = slice(first, end)
        own = None if points is None else points[part]
        plain = Quantised(INTEGERS[bits], levels[part], scales[part].contiguous(), own)
        way_points = packed_in_words(own, 4, ORDER) if own is not None and zeros == "words" else own
        given = Quantised(INTEGERS[bits], pack(levels[part]), scales[part], way_points)
        assert torch.equal(given.plain_levels, levels[part])
        for format in formats:
            expected = plain if plain.fits(format) else plain.floats()
            assert given.fits(format) == plain.fits(format)
            for row in (0, 5):  # five: AWQ's words and the blocks of 16 rows do not begin together
                assert torch.equal(filled(format, (row, given)), filled(format, (row, expected)))


@pytest.mark.parametrize("group", [32, 128])
def test_e4m3_floats(group: int) -> None:
    torch.manual_seed(4)
    values = torch.arange(256, dtype=torch.uint8).repeat(ROWS, 1)
    values = torch.where(values & 127 == 127, 1, values).view(torch.float8_e4m3fn)  # all but the two NaN
    part = Quantised(F8, values, torch.rand(ROWS, COLUMNS // group), None)
    for format in (Format("f8", 32), *BASIC.values()):
        expected = filled(format, (5, part if part.fits(format) else part.floats()))
        assert torch.equal(filled(format, (5, part)), expected)
        assert expected[-1]  # all are finite
        nan = values.clone().view(torch.uint8)
        nan[44, 255] = 0xFF
        assert not filled(format, (5, Quantised(F8, nan.view(torch.float8_e4m3fn), part.scales, None)))[-1]
    matrix = NativeMatrix(ROWS, COLUMNS, FORMATS["float32"], CPU)
    matrix.fill(0, part)
    assert torch.equal(matrix.packed.dequantised(0, ROWS), part.floats())


def test_int8_rows_are_kept_bit_for_bit() -> None:
    """Their scales are float32, of any size; also in smaller groups and in another order."""
    torch.manual_seed(9)
    levels = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8)
    part = Quantised(FORMATS["w8a8"].spec, levels, torch.logspace(-30, 30, ROWS)[:, None], None)
    order = torch.randperm(ROWS).tolist()
    for given in (part, cast(Quantised, in_order(part, order))):
        for group in GROUP_SIZES:
            matrix = NativeMatrix(ROWS, COLUMNS, Format("w8a8", group), CPU)
            assert given.fits(Format("w8a8", group))
            assert matrix.fill(0, given) is True
            assert torch.equal(matrix.packed.dequantised(0, ROWS), given.floats())
    assert torch.equal(given.floats(), (levels.double() * part.scales).float()[order])


def test_mxfp4_is_kept_bit_for_bit() -> None:
    """Codes of every value, scales up to the largest floats, of which the two smallest are subnormal, and rows of two
    matrices in turn; as floats elsewhere. 255 is no number."""
    torch.manual_seed(8)
    codes = torch.randint(16, (ROWS, COLUMNS), dtype=torch.uint8)
    codes[0], codes[1, :16] = torch.arange(COLUMNS) % 16, torch.arange(16)
    exponents = torch.arange(ROWS * COLUMNS // 32, dtype=torch.int64).remainder(253).to(torch.uint8).view(ROWS, -1)
    words, scales = packed_in_words(codes, 4, None), exponents.view(torch.float8_e8m0fnu)
    part = Quantised(FORMATS["mxfp4"].spec, words, scales, None)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    steps = 2.0 ** (exponents.double() - 127)
    expected = (values[codes.int()].unflatten(1, (-1, 32)) * steps[..., None]).flatten(1).float()
    assert torch.equal(part.floats(), expected)
    for format in (FORMATS["mxfp4"], FORMATS["float32"]):
        matrix = NativeMatrix(ROWS, COLUMNS, format, CPU)
        assert matrix.fill(0, part) is True
        assert torch.equal(matrix.packed.dequantised(0, ROWS), expected)
    for rows, first in zip(every_other(part), (0, 1), strict=True):
        matrix = NativeMatrix(ROWS, COLUMNS, FORMATS["mxfp4"], CPU)
        matrix.fill(3, rows)
        assert torch.equal(matrix.packed.dequantised(0, (ROWS + 1 - first) // 2, 3), expected[first::2])
    exponents[-1, -1] = 255
    assert NativeMatrix(ROWS, COLUMNS, FORMATS["mxfp4"], CPU).fill(0, part) is False


@pytest.mark.parametrize("kind", [kind for kind, spec in SPECS.items() if spec.nesting and not spec.record])
def test_scales_of_scales_are_kept_bit_for_bit(kind: str) -> None:
    """In pieces that begin anywhere and in parts of ranks."""
    torch.manual_seed(9)
    part = nested(kind, ROWS, 512)
    for first, end, group in ((0, 512, 256), (0, 512, 32), (64, 192, 64), (224, 512, 32), (256, 512, 256)):
        ours = part.columns(first, end)
        assert torch.equal(ours.floats(), part.floats()[:, first:end])
        matrix = NativeMatrix(ROWS, end - first, Format(kind, group), CPU)
        for row in range(0, ROWS, 7):
            assert matrix.fill(row, ours.rows(slice(row, row + 7))) is True
        assert torch.equal(matrix.packed.dequantised(0, ROWS), ours.floats())
    floats = NativeMatrix(ROWS, 512, FORMATS["float32"], CPU)
    floats.fill(0, part)
    assert torch.equal(floats.packed.dequantised(0, ROWS), part.floats())
    part.d[-1, -1] = math.inf
    assert NativeMatrix(ROWS, 512, FORMATS[kind], CPU).fill(0, part) is False
    with pytest.raises(UserError, match=f"{kind} holds a checkpoint's own rows only"):
        NativeMatrix(ROWS, 512, FORMATS[kind], CPU).fill(0, torch.zeros(ROWS, 512))


def test_floats_become_the_nearest_e2m1_floats() -> None:
    w = torch.tensor(
        [0, 0.25, 0.26, 0.75, 1.25, 1.3, 1.75, 2.5, 2.6, 3.5, 5, 5.1, 6, 7.9, -0.25, -7], dtype=torch.float32
    )
    matrix = NativeMatrix(ROWS, 32, FORMATS["mxfp4"], CPU)
    matrix.fill(0, torch.cat([w, -w])[None] * 2**-9)
    near = torch.tensor([0, 0, 0.5, 1, 1, 1.5, 2, 2, 3, 4, 4, 6, 6, 6, 0, -6])
    assert torch.equal(matrix.packed.dequantised(0, 1)[0] * 2**9, torch.cat([near, -near]))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", [*BASIC, "f8", "w8a8"])
def test_values_that_are_not_finite_are_found_wherever_they_are(dtype: torch.dtype, value: float, kind: str) -> None:
    torch.manual_seed(5)
    format = BASIC.get(kind, Format(kind, 32))
    columns = COLUMNS if format.group else 33
    for row, column in ((0, 0), (ROWS - 1, columns - 1), (17, 31)):
        w = torch.randn(ROWS, columns).to(dtype)
        matrix = NativeMatrix(ROWS, columns, format, CPU)
        assert matrix.fill(0, w) is True
        w[row, column] = value
        assert matrix.fill(0, w) is False
    experts = NativeExperts(2, 64, 64, format, CPU)
    w = torch.randn(64, 64).to(dtype)
    assert experts.fill(1, "up", w) is True
    w[63, 63] = value
    assert experts.fill(1, "up", w) is False
    assert experts.fill(0, "down", w) is False


@pytest.mark.parametrize("scale", [65520.0, float("inf"), float("nan")])
def test_a_scale_beyond_halves_is_refused(scale: float) -> None:
    scales = torch.ones(ROWS, COLUMNS // 32)
    part = Quantised(INTEGERS[4], torch.zeros(ROWS, COLUMNS, dtype=torch.uint8), scales, None)
    matrix = NativeMatrix(ROWS, COLUMNS, Format("q4", 32), CPU)
    matrix.fill(0, part)
    scales[-1, -1] = scale
    with pytest.raises(UserError, match="a scale is beyond float16's range"):
        matrix.fill(0, part)


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_tables(source: torch.dtype, target: torch.dtype) -> None:
    torch.manual_seed(6)
    w = weights(source)[:, 1:100]
    to = table(ROWS, 99, target, CPU)
    assert fill_table(to, w) is True
    assert torch.equal(to, w.to(target))
    w[44, 98] = float("inf")
    assert fill_table(to, w) is False
    assert table(3, 5, target, torch.device("meta")).shape == (3, 5)


def test_what_is_no_matrix_is_refused() -> None:
    matrix = NativeMatrix(ROWS, COLUMNS, Format("q4", 32), CPU)
    with pytest.raises(TypeError, match="are not of neighbours"):
        matrix.fill(0, torch.randn(COLUMNS, ROWS).T)
    levels = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="scales of shape"):
        matrix.fill(0, Quantised(INTEGERS[4], levels, torch.ones(ROWS - 1, 8), None))
    with pytest.raises(AssertionError, match=f"{COLUMNS - 32} columns for a matrix of {COLUMNS}"):
        matrix.fill(0, torch.randn(ROWS, COLUMNS - 32))
