"""Attention over latents: the native kernels against the reference, and the bits of these, which depend on no
schedule."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops import reference
from umbra.ops.cpu import engine
from umbra.ops.cpu import ops as cpu
from umbra.ops.formats import FORMATS, Format
from umbra.ops.interface import Paged

CPU, NONE = torch.device("cpu"), torch.empty(0, dtype=torch.int64)
SETS = engine.module.instruction_sets()
VECTORS = [s for s in ("generic", "avx2", SETS[-1]) if s in SETS]  # sets with kernels of their own
TYPES = torch.float32, torch.bfloat16, torch.float16, torch.int8


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    torch.manual_seed(11)
    yield
    engine.start(1, "auto")


class Latents:
    """Sequences of `lens` tokens in a cache, on pages in random order."""

    def __init__(self, ops: Any, lens: list[int], width: int, rotary: int, page_size: int, dtype: torch.dtype):
        torch.manual_seed(3)
        counts = [-(-n // page_size) for n in lens]
        order = torch.randperm(sum(counts)).tolist()
        self.ops, self.tables = ops, torch.zeros(len(lens), max(counts), dtype=torch.int64)
        slots = []
        for s, count in enumerate(counts):
            self.tables[s, :count] = torch.tensor([order.pop() for _ in range(count)])
            slots += [int(self.tables[s, i // page_size]) * page_size + i % page_size for i in range(lens[s])]
        self.cache = (ops.latent_cache(0, sum(counts), page_size, width, rotary, dtype, CPU),)
        rows = torch.randn(sum(lens), width + rotary + 3)  # columns of a wider product
        rows[:, width:] *= 2
        ops.write_latents(rows[:, :width], rows[:, width : width + rotary], self.cache, torch.tensor(slots))

    def attend(self, q: Tensor, q_rotary: Tensor, lens: list[int], new: list[int], first: int = 0) -> Tensor:
        starts = torch.tensor([0, *itertools.accumulate(new)])
        paged = Paged(NONE, self.tables[first : first + len(lens)], starts, torch.tensor(lens))
        sums: Tensor = self.ops.latent_attention(q, q_rotary, self.cache, paged, 0.05)
        return sums

    def expand(
        self, q: Tensor, q_rotary: Tensor, heads: tuple[Any, Any], lens: list[int], new: list[int], first: int = 0
    ) -> Tensor:
        starts = torch.tensor([0, *itertools.accumulate(new)])
        paged = Paged(NONE, self.tables[first : first + len(lens)], starts, torch.tensor(lens))
        sums: Tensor = self.ops.expanded_attention(q, q_rotary, self.cache, *heads, paged, 0.05)
        return sums


def key_and_value_matrices(ops: Any, heads: int, latent: int, key: int, value: int, format: Format) -> tuple[Any, Any]:
    torch.manual_seed(5)
    both = ops.head_matrices(heads, latent, key, format, CPU), ops.head_matrices(heads, value, latent, format, CPU)
    for matrices, shape in zip(both, ((latent, key), (value, latent)), strict=True):
        for head in range(heads):
            matrices.fill(head, torch.randn(shape) * latent**-0.5)
    return both


@pytest.mark.parametrize("instruction_set", VECTORS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("lens", "new", "heads", "width", "rotary", "page_size"),
    [
        pytest.param([9, 1, 16], [9, 1, 16], 6, 32, 8, 4, id="prefill"),
        pytest.param([1100, 17, 64], [1, 1, 1], 16, 512, 64, 16, id="decode over sections, true sizes"),
        pytest.param([70], [1], 20, 48, 16, 16, id="heads divided over threads"),
        pytest.param([130, 40], [70, 3], 20, 48, 6, 5, id="later chunks, columns that no vector divides"),
        pytest.param([70], [2], 96, 64, 16, 16, id="heads in three parts"),
    ],
)
def test_latent_attention(
    instruction_set: str,
    dtype: torch.dtype,
    lens: list[int],
    new: list[int],
    heads: int,
    width: int,
    rotary: int,
    page_size: int,
) -> None:
    engine.start(2, instruction_set)
    ours, theirs = (Latents(ops, lens, width, rotary, page_size, dtype) for ops in (cpu, reference))
    q, q_rotary = torch.randn(sum(new), heads, width), torch.randn(sum(new), heads, rotary) * 2
    sums, expected = (of.attend(q, q_rotary, lens, new) for of in (ours, theirs))
    rounded = "bf16" in instruction_set or instruction_set == "amx"  # queries and weights are
    close = 0.05 if rounded and dtype in (torch.bfloat16, torch.int8) else 2e-3 if dtype == torch.int8 else 2e-5
    torch.testing.assert_close(sums, expected, atol=close, rtol=0)


@pytest.mark.parametrize("instruction_set", VECTORS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("lens", "new", "heads", "sizes", "page_size"),
    [
        pytest.param([9, 1, 16], [9, 1, 16], 6, (32, 8, 24, 16), 4, id="keys wider than values"),
        pytest.param([1100, 70], [80, 3], 2, (512, 64, 128, 128), 16, id="chunks over sections, true sizes"),
        pytest.param([130, 40], [70, 33], 5, (48, 6, 18, 40), 5, id="values wider than keys"),
    ],
)
def test_expanded_attention(
    instruction_set: str,
    dtype: torch.dtype,
    lens: list[int],
    new: list[int],
    heads: int,
    sizes: tuple[int, int, int, int],
    page_size: int,
) -> None:
    """The absorbed form has the same result."""
    engine.start(2, instruction_set)
    latent, rotary, key, value = sizes
    ours, theirs = (Latents(ops, lens, latent, rotary, page_size, dtype) for ops in (cpu, reference))
    format = FORMATS["float32" if dtype == torch.float32 else "bfloat16"]
    native, plain = (key_and_value_matrices(ops, heads, latent, key, value, format) for ops in (cpu, reference))
    q, q_rotary = torch.randn(sum(new), heads + 1, key)[:, :heads], torch.randn(sum(new), heads, rotary) * 2
    expected = theirs.expand(q, q_rotary, plain, lens, new)
    absorbed = theirs.attend(reference.head_linear(q, plain[0]), q_rotary, lens, new)
    torch.testing.assert_close(reference.head_linear(absorbed, plain[1]), expected, atol=2e-5, rtol=0)
    rounded = "bf16" in instruction_set or instruction_set == "amx"
    close = 0.05 if rounded and dtype != torch.float32 else 2e-3 if dtype == torch.int8 else 2e-5
    torch.testing.assert_close(ours.expand(q, q_rotary, native, lens, new), expected, atol=close, rtol=0)


def test_matrices_in_8_bits_are_expanded_as_they_multiply() -> None:
    engine.start(2, "auto")
    ours, theirs = (Latents(ops, [80], 64, 16, 16, torch.float32) for ops in (cpu, reference))
    native = key_and_value_matrices(cpu, 3, 64, 32, 64, Format("q8", 32))
    plain = key_and_value_matrices(reference, 3, 64, 32, 64, FORMATS["float32"])
    q, q_rotary = torch.randn(80, 3, 32), torch.randn(80, 3, 16)
    expected = theirs.expand(q, q_rotary, plain, [80], [80])
    torch.testing.assert_close(ours.expand(q, q_rotary, native, [80], [80]), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("instruction_set", VECTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_bits_do_not_depend_on_threads_company_or_chunks(instruction_set: str, dtype: torch.dtype) -> None:
    lens, new = [40, 1060, 1], [40, 30, 1]
    engine.start(1, instruction_set)
    latents = Latents(cpu, lens, 64, 16, 16, dtype)
    q, q_rotary = torch.randn(71, 40, 64), torch.randn(71, 40, 16)
    heads = key_and_value_matrices(cpu, 40, 64, 64, 24, FORMATS["bfloat16"])
    together = latents.attend(q, q_rotary, lens, new), latents.expand(q, q_rotary, heads, lens, new)
    for threads in (1, 3):
        engine.start(threads, instruction_set)
        for first, count in ((40, 30), (43, 5), (69, 1)):
            rows, length = slice(first, first + count), lens[1] - (70 - first - count)
            alone = (
                latents.attend(q[rows], q_rotary[rows], [length], [count], 1),
                latents.expand(q[rows], q_rotary[rows], heads, [length], [count], 1),
            )
            assert all(torch.equal(one, of[rows]) for one, of in zip(alone, together, strict=True))


@pytest.mark.parametrize("format", [*(FORMATS[kind] for kind in ("float32", "bfloat16")), Format("q8", 32)])
def test_each_head_has_its_own_matrix(format: Format) -> None:
    engine.start(2, "auto")
    x, weights = torch.randn(70, 3, 64), torch.randn(3, 40, 64)
    wider = torch.cat((x.flatten(1), x[:, 0]), 1)[:, : 3 * 64].unflatten(1, (3, 64))
    ours = cpu.head_matrices(3, 40, 64, format, CPU)
    theirs = reference.head_matrices(3, 40, 64, FORMATS["float32"], CPU)
    for head, own in enumerate(weights):
        ours.fill(head, own)
        theirs.fill(head, own)
    product = cpu.head_linear(x, ours)
    close = 1e-4 if format.kind == "float32" else 0.4
    torch.testing.assert_close(product, reference.head_linear(x, theirs), atol=close, rtol=0)
    assert torch.equal(cpu.head_linear(wider[69:], ours), product[69:])
    assert torch.equal(cpu.head_linear(wider, ours), product)


def test_latents_that_are_too_wide_are_named() -> None:
    with pytest.raises(UserError, match=r"kv_lora_rank: 514, .* at most 512 and 64 columns"):
        cpu.latent_cache(0, 1, 16, 514, 64, torch.float32, CPU)
