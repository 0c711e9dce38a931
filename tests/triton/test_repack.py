"""ops/triton/repack.py in Triton's interpreter, bit for bit beside what the loader and ops/ascend/weights.py make of
the same checkpoint tensors."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from executor.formats.awq import unpacked
from executor.formats.words import unpack
from ops.ascend.weights import Plane
from ops.interface import Format
from ops.quantised import Quantised
from ops.triton import repack
from tests.triton.mutants import mutant

Kept = tuple[Tensor, Tensor, Tensor | None]


def words(*shape: int) -> Tensor:
    """Any bits."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def plane(part: Quantised, dtype: torch.dtype) -> Kept:
    """What the ascend ops keep of `part`."""
    rows, columns = part.levels.shape
    format = Format("q4", part.group, zeros=part.zeros is not None)
    kept = Plane((), rows, columns, format, dtype, torch.device("cpu"))
    kept.put((), 0, part)
    assert kept.scales is not None
    return kept.data, kept.scales, kept.offsets


def check(ours: Kept, kept: Kept) -> None:
    for one, other in zip(ours, kept, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.is_contiguous()
        assert torch.equal(one, other)


def check_awq(kernels: ModuleType, qweight: Tensor, qzeros: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    part = Quantised(bits=4, levels=unpacked(qweight), scales=scales.T, zeros=unpacked(qzeros))
    check(kernels.awq(qweight, qzeros, scales, dtype), plane(part, dtype))


def check_compressed(
    kernels: ModuleType, packed: Tensor, zeros: Tensor | None, scales: Tensor, dtype: torch.dtype
) -> None:
    levels = None if zeros is None else unpack(zeros, 4).transpose(1, 2).flatten(0, 1)
    part = Quantised(bits=4, levels=unpack(packed, 4).flatten(-2), scales=scales, zeros=levels)
    check(kernels.compressed(packed, zeros, scales, dtype), plane(part, dtype))


SCALES = [(torch.float16, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
# Less than a block and a tile; not whole blocks and tiles; more of them than programs.
SIZES = [(n, k, group, *types) for n, k, group in [(8, 32, 32), (264, 544, 32), (24, 384, 128)] for types in SCALES]
SIZES.append((2048, 2048, 64, torch.float16, torch.bfloat16))


@pytest.mark.parametrize(("n", "k", "group", "scale_type", "dtype"), SIZES)
def test_awq(n: int, k: int, group: int, scale_type: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    scales = torch.rand(k // group, n).to(scale_type)
    check_awq(repack, words(k, n // 8), words(k // group, n // 8), scales, dtype)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("n", "k", "group", "scale_type", "dtype"), SIZES)
def test_compressed(n: int, k: int, group: int, scale_type: torch.dtype, dtype: torch.dtype, zeros: bool) -> None:
    torch.manual_seed(n)
    scales = torch.rand(n, k // group).to(scale_type)
    packed_zeros = words(n // 8, k // group) if zeros else None
    check_compressed(repack, words(n, k // 8), packed_zeros, scales, dtype)


def small_awq(kernels: ModuleType) -> None:
    torch.manual_seed(0)
    check_awq(kernels, words(64, 3), words(2, 3), torch.rand(2, 24).half(), torch.bfloat16)


def small_compressed(kernels: ModuleType) -> None:
    torch.manual_seed(0)
    check_compressed(kernels, words(24, 8), words(3, 2), torch.rand(24, 2).half(), torch.bfloat16)


def a_rank_s_share(kernels: ModuleType) -> None:
    """Some columns of a wider tensor."""
    torch.manual_seed(0)
    scales = torch.rand(2, 64).half()
    check_awq(kernels, words(64, 8)[:, 2:5], words(2, 8)[:, 2:5], scales[:, 16:40], torch.float16)
    check_compressed(kernels, words(24, 16)[:, 4:12], words(3, 4)[:, 1:3], scales.T[:24], torch.float16)


CASES = {case.__name__: case for case in (small_awq, small_compressed, a_rank_s_share)}


def test_a_rank_s_share() -> None:
    a_rank_s_share(repack)


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        ("small_awq", "((x >> (j % 2 * 4 + j // 2) * 4) & 15) << 4 * j", "((x >> j * 4) & 15) << 4 * j"),
        ("small_awq", "y ^ FLIP", "y"),
        ("small_awq", "8 - zero[None, :]", "zero[None, :] - 8"),
        ("small_awq", "(j % 2 * 4 + j // 2) * 4 if AWQ else 4 * j", "4 * j"),
        ("small_compressed", "(j % 2 * 4 + j // 2) * 4 if AWQ else 4 * j", "(j % 2 * 4 + j // 2) * 4"),
        ("small_compressed", "tl.trans(y) ^ FLIP", "tl.trans(y)"),
        ("small_compressed", "((x >> 4 * i) & 15) << 4 * j", "((x >> 4 * j) & 15) << 4 * i"),
        ("small_compressed", "scales.T.to(dtype)", "scales.to(dtype)"),
        ("a_rank_s_share", "kernel[(min(triton.cdiv(count, block), PROGRAMS),)](words.contiguous()",
         "kernel[(min(triton.cdiv(count, block), PROGRAMS),)](words"),
        ("a_rank_s_share", "(packed.contiguous()", "(packed"),
        ("a_rank_s_share", "_offsets(zeros.T,", "_offsets(zeros,"),
    ],
)  # fmt: skip
def test_mutant_is_caught(case: str, old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        CASES[case](mutant(repack, old, new, tmp_path))


def test_every_level_of_awq_by_hand() -> None:
    """Nibble i of 0x76543210 is level i; outputs 0 to 7 are levels 0, 4, 1, 5, 2, 6, 3, 7: 8, c, 9, d, a, e, b, f."""
    qweight = torch.full((32, 1), 0x76543210, dtype=torch.int32)
    qzeros = torch.full((1, 1), 0x76543210, dtype=torch.int32)
    kept, _, offsets = repack.awq(qweight, qzeros, torch.ones(1, 8).half(), torch.float16)
    assert {word & 0xFFFFFFFF for word in kept.flatten().tolist()} == {0xFBEAD9C8}
    assert offsets.tolist() == [[8, 4, 7, 3, 6, 2, 5, 1]]


def test_outputs_must_fill_words() -> None:
    with pytest.raises(ValueError, match="12 outputs do not fill words of 8"):
        repack.compressed(words(12, 4), None, torch.ones(12, 1), torch.float16)
