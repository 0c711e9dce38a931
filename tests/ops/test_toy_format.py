"""A format that only this file knows: its FormatSpec, its row of traits, and no other change. The product's own files
of kernels are compiled with a header in which the row stands (alone, which is quick), and every instruction set of this
CPU multiplies the format's weights."""

import ctypes
import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ops.cpu.native.build import CACHE, SOURCES, compile_all, core_sources, made_once
from umbra.ops.cpu import engine
from umbra.ops.cpu.matrix import plane_bytes
from umbra.ops.formats import SPECS, Format, FormatSpec
from umbra.ops.formats.quantised import Quantised

BYTES, MIDDLE = (0, 1, 3, 7, 12, 18, 19, 20, 21, 22, 28, 40, 55, 77, 99, 120), 20
TOY = FormatSpec("toy", 4, group=32, codes=tuple((byte - MIDDLE) / 2 for byte in BYTES))
ROW = f'{{"toy", 4, Storage::nibbles, {MIDDLE}, Scales::halves, kToy, 0.5f}},'
CODES = f"constexpr uint8_t kToy[16] = {{{', '.join(map(str, BYTES))}}};"
TABLE = "constexpr FormatTraits kFormatTraits[] = {\n"
# What Python calls: packs levels and scales, unpacks them, and multiplies rows with a set of kernels.
DRIVER = """
#include "kernels/dispatch.h"
#include "kernels/pack.h"
using namespace umbra;

extern "C" int multiply(const char* set, int n, int k, int group, const uint8_t* levels, const float* scales, int count,
                        const float* x, float* y, float* weights, int64_t* sizes) {
    const Kernels& kernels = choose_kernels(set);
    Pool pool(1);
    Context context{pool, kernels};
    Matrix w;
    w.format = format_named("toy"), w.order = kernels.order, w.n = n, w.k = k, w.group = group;
    sizes[0] = n / kRows * w.quant_stride(), sizes[1] = n / kRows * w.scale_count() * 2;
    std::vector<uint8_t> quants(sizes[0] + 64);
    std::vector<uint16_t> halves(sizes[1] / 2);
    w.quants = quants.data() + (64 - reinterpret_cast<uintptr_t>(quants.data()) % 64), w.scales = halves.data();
    Given given{{levels, Kind::u8, k, 4},
                {reinterpret_cast<const uint8_t*>(scales), Kind::f32, k / group * 4, 4}, {}, group};
    const int flags = pack_rows(context, w, {0, 0, 1}, n, k, given, true);
    unpack_rows(context, w, {0, 0, 1}, n, weights);
    std::vector<Block> blocks(count * k / kBlock);
    kernels.quantise(x, count * k / kBlock, blocks.data());
    const int format = static_cast<int>(w.format);
    for (int block = 0; block < n / kRows; block++)
        kernels.product[format](w, block, {x, blocks.data()}, nullptr, count, y + block * kRows, n);
    return flags;
}
"""


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """The product's files, compiled with the format's row."""
    header = (SOURCES / "kernels" / "formats.h").read_text()
    before, rest = header.split(TABLE)
    folder = CACHE / "toy_format"  # a path that stays, so that objects are made once
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    after = rest[rest.index("};") :]
    write(folder / "kernels" / "formats.h", f"{before}{CODES}\n{TABLE}    {ROW}\n{after}")
    write(folder / "driver.cpp", DRIVER)
    flags = [f"-iquote{folder}", "-O0", "-w", "-fPIC", "-pthread"]
    objects = compile_all("g++", flags, [*core_sources(platform.machine()), folder / "driver.cpp"])
    return ctypes.CDLL(str(made_once("toy.so", ["g++", *objects, "-shared", "-pthread"])))


def write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Format:
    monkeypatch.setitem(SPECS, TOY.name, TOY)
    return Format(TOY.name, TOY.group)


def rounded(x: Tensor) -> Tensor:
    """x (m, K) float64 as the kernels round activations: to int8 with a scale for every 32 columns."""
    blocks = x.unflatten(1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scales).round() * scales).flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", engine.module.instruction_sets())
@pytest.mark.parametrize("group", [32, 128])
def test_a_new_format_is_multiplied_by_every_set(
    library: ctypes.CDLL, toy: Format, instruction_set: str, group: int
) -> None:
    torch.manual_seed(1)
    n, k, count = 48, 384, 11
    levels, scales = torch.randint(16, (n, k), dtype=torch.uint8), torch.rand(n, k // group).half().float()
    part, x = Quantised(TOY, levels, scales, None), torch.randn(count, k)
    y, weights, sizes = torch.empty(count, n), torch.empty(n, k), torch.empty(2, dtype=torch.int64)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (levels, scales, x, y, weights, sizes)]
    flags = library.multiply(instruction_set.encode(), n, k, group, *pointers[:2], count, *pointers[2:])
    assert flags == 0
    assert part.fits(toy) == (group == 32 or group % toy.group == 0)
    assert torch.equal(weights, part.floats())
    assert sizes.tolist() == plane_bytes(n, k, Format(TOY.name, group), biased=False)[:2]
    expected = rounded(x.double()) @ part.floats().double().T
    torch.testing.assert_close(y.double(), expected, atol=1e-3, rtol=1e-5)
