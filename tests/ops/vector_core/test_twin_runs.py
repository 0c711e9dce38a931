"""The twin's moves, tiling data and counts, the host side's launch, and sources that must not compile."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fakes.ascend_c import LIBRARY_WORKSPACE, Launch, TwinError, build, check, clang, host, run
from tests.fakes.ascend_c.launch import KERNELS
from tests.ops.vector_core.test_twin import PROBES, TILING, probes
from tests.ops.vector_core.test_twin_ops import equal, random

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
needs_clang = pytest.mark.skipif(not clang(), reason="needs clang++, which test.sh installs")


def move(name: str) -> tuple[Tensor, Tensor]:
    x = random(torch.int16, 1)
    return x, run(probes("ops"), name, {"x": x}, {"y": ((2048,), torch.int16)}, b"", cores=1)[0]["y"]


def test_moves() -> None:
    x, y = move("pad_in")
    wanted = torch.full((2048,), -1, dtype=torch.int16)
    for row in range(5):
        wanted[row * 32 : row * 32 + 16] = 77
        wanted[row * 32 + 2 : row * 32 + 12] = x[1 + row * 22 : 11 + row * 22]
    equal(y, wanted)
    x, y = move("pad_out")
    wanted = torch.full((2048,), -1, dtype=torch.int16)  # the bytes that outputs start with
    for row in range(5):
        wanted[1 + row * 13 : 11 + row * 13] = x[row * 32 : row * 32 + 10]
    equal(y, wanted)
    for name, from_step, to_step in (("blocks", 3, 5), ("blocks_out", 3, 5)):
        x, y = move(name)
        wanted = torch.full((2048,), -1, dtype=torch.int16)
        for piece in range(3):
            wanted[piece * to_step * 16 :][:32] = x[piece * from_step * 16 :][:32]
        equal(y, wanted)


@pytest.mark.parametrize("key", [1, 2])
def test_tiling_data(key: int) -> None:
    tiling = struct.pack("<IxxxxQB7x", 9, 5 << 32, 250)
    outputs = {"y": ((3, 8), torch.int32)}
    y = run(probes("ops"), "tiling_and_ids", {"absent": None}, outputs, tiling, cores=3, key=key)[0]["y"]
    assert y.tolist() == [[9, 5, 250, core, 3, int(key == 2), 1, 0] for core in range(3)]
    with pytest.raises(TwinError, match="GET_TILING_DATA of 24 bytes, the host wrote 8"):
        run(probes("ops"), "tiling_and_ids", {"absent": None}, outputs, tiling[:8], cores=3)


def test_counts() -> None:
    x = torch.ones(2048, dtype=torch.half)
    outputs = {"y": ((1024,), torch.half)}
    written, counts = run(probes("ops"), "counted", {"x": x}, outputs, b"", cores=2)
    assert written["y"].view(2, 4, 128)[:, 0].tolist() == [[1.0] * 128, [2.0] * 128]
    assert counts.buffers == {
        "x": {"read": 3 * 256 + 2 * 2, "written": 0},
        "y": {"read": 0, "written": 2048},
        "workspace": {"read": 0, "written": 0},
    }
    first, second = counts.cores[1]
    assert first["mte2"] == {"count": 2, "bytes": 512, "bursts": 8, "by_move": {"256": 2}, "by_burst": {"64": 8}}
    assert first["instructions"] == {"Duplicate<half>": 1, "Add<half>": 2}
    assert first["repeats"] == {"Duplicate<half>": 4, "Add<half>": 2}
    assert first["conflicts"] == {"Add<half>": 2}  # the sources are 2048 and 1024 bytes apart
    assert first["barriers"] == {"V": 2, "ALL": 1}  # SyncAll begins with PIPE_ALL
    assert (first["flags"], first["scalar_ub"], first["scalar_gm"], first["scalar_gm_bytes"]) == (0, 0, 1, 2)
    assert second["mte3"] == {"count": 1, "bytes": 1024, "bursts": 1, "by_move": {"1024": 1}, "by_burst": {"1024": 1}}
    assert second["flags"] == 1
    assert counts.waits == 1
    assert counts.total["mte2"]["by_burst"] == {"64": 12}


def test_loads_go_on_over_a_cross_core_flag_and_end_before_a_sync_all() -> None:
    x, outputs = torch.ones(512, dtype=torch.half), {"y": ((512,), torch.half)}
    counts = run(probes("ops"), "loaded_ahead", {"x": x}, outputs, b"", cores=1)[1]
    assert [phase["ahead"] for phase in counts.cores[0]] == [0, 0, 1, 0]


CONFLICTS = {  # cycles; the scenarios of asc-devkit's bank_conflict_ub, and the documented 8 and 4 cycles of a write
    "add_1": {},
    "add_2": {"Add<float>": 64},
    "add_3": {"Add<float>": 64},
    "add_4": {},
    "add_5": {"Add<float>": 64},
    "add_6": {},
    "add_7": {"Add<float>": 32},
    "add_8": {},
    "blocks_16_apart": {"Muls<float>": 7},
    "blocks_8_apart": {"Muls<float>": 3},
    "read_once": {"Add<float>": 1},
    "three_reads": {"MulAddDst<float,float>": 10},
    "other_thirds": {},
    "widened": {"MulAddDst<float,half>": 3},
    "seed_axpy": {},
    "seed_scale": {"MulAddDst<float,float>": 24},
}


@pytest.mark.parametrize("kernel", CONFLICTS)
def test_bank_conflicts(kernel: str) -> None:
    counts = run(probes("banks"), kernel, {}, {}, b"", cores=1)[1]
    assert counts.total["conflicts"] == CONFLICTS[kernel]


REFUSED = {  # a, b: bfloat16_t; i: int32_t; h: half; f: float; n: uint32_t
    "Add(a, b, b, 16)": "Add does not support this type",
    "And(i, i, i, 16)": "And does not support this type",
    "Cast(h, a, RoundMode::CAST_RINT, 16)": "Cast does not support this pair",
    "MulAddDst(f, a, b, 16)": "MulAddDst does not support these types",
    "Axpy(f, f, half(1), 16)": "no matching function for call to .Axpy",
    "Muls(f, f, 1, 16)": "no matching function for call to .Muls",
    "Abs(i, i, 16)": "Abs takes half and float",
    "WholeReduceSum(i, i, 8, 1, 1, 1, 8)": "reductions take half and float",
    "Select(h, n, h, h, 16)": "Select writes to bytes 184 to 192 KB",
    "AddDeqRelu(h, i, i, 16)": "AddDeqRelu writes to bytes 184 to 192 KB",
    "SyncAll<false>()": "would wait for cube cores",
    "Mul(h, h, h, 16, 1, {1, 1, 1, n, 8, 8})": "narrowing conversion of .n.",
}


def test_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    body = "".join(f"    {call};\n" for call in REFUSED)
    source.write_text(
        '#include "kernel_operator.h"\nusing namespace AscendC;\n'
        "void body(LocalTensor<bfloat16_t> a, LocalTensor<bfloat16_t> b, LocalTensor<int32_t> i,\n"
        f"          LocalTensor<half> h, LocalTensor<float> f, uint32_t n) {{\n{body}}}\n"
    )
    with pytest.raises(TwinError) as refused:
        build(source, TILING, "ProbeTiling")
    for call, rule in REFUSED.items():
        assert re.search(rule, str(refused.value)), call


def probe_op(*inputs: tuple[tuple[int, ...], torch.dtype] | None, op: str = "ProbeOp") -> Launch:
    return host(op, inputs, cores=6, folder=PROBES / "op_host")


def test_launch_runs_the_kernel() -> None:
    launch = probe_op(((7, 4), torch.bfloat16), None, ((4, 5), torch.bfloat16))
    assert launch.outputs == {"y": ((7, 5), torch.bfloat16)}
    assert (launch.key, launch.blocks, launch.workspace) == (2, 3, LIBRARY_WORKSPACE + 64)
    outputs = {"y": ((3, 8), torch.int32)}
    y = run(probes("ops"), "tiling_and_ids", {"absent": None}, outputs, launch.tiling, launch.workspace, 3, launch.key)[
        0
    ]["y"]
    assert y[2].tolist() == [7, 5, 99, 2, 3, 1, 1, 0]


STRICT = {  # what clang says with the macros of the real headers, in a form that makes mistakes errors
    "struct Two { GM_ADDR a, b; };": "field may not be qualified with an address space",
    "__aicore__ void kept(const GM_ADDR at) { auto p = reinterpret_cast<__gm__ half*>(at); }": "reinterpret_cast fr",
    "__aicore__ void generic(GM_ADDR at) { auto p = reinterpret_cast<half*>(at); }": "reinterpret_cast from",
    "__aicore__ void local(uint8_t* at) { GlobalTensor<uint8_t>().SetGlobalBuffer(at); }": "cannot initialize a param",
    "int ours() { return 1; }\n__aicore__ int calls() { return ours(); }": "no matching function for call to 'ours'",
    '__aicore__ void out() { std::stoi("1"); }': "no matching function for call to 'stoi'",
    "__aicore__ void frees(TQue<TPosition::VECIN, 1>& q) { q.FreeTensor(q.DeQue<half>()); }": "no matching member func",
}


@needs_clang
@pytest.mark.parametrize("kernels", ["umbra_[fg]*.cpp", "umbra_unpack_*.cpp"])  # names of the two kinds collide
def test_kernels_compile_with_strict_macros(kernels: str) -> None:
    sources = sorted(KERNELS.glob(kernels))
    assert sources
    assert check("".join(f'#include "{path}"\n' for path in sources)) == ""


@needs_clang
def test_mistakes_of_address_spaces() -> None:
    code = [line for mistake in STRICT for line in mistake.split("\n")]
    said = check("\n".join(["using namespace AscendC;", *code]))
    errors = {int(line): text for line, text in re.findall(r"<stdin>:(\d+):\d+: error: (.*)", said)}
    at = 1
    for mistake, complaint in STRICT.items():
        at += mistake.count("\n") + 1
        assert errors.get(at, "").startswith(complaint), (mistake, said)
    assert len(errors) == len(STRICT), said


def test_no_lambdas() -> None:
    """CANN's own sources mark them with an attribute of its compiler, or they are functions of the host."""
    for path in KERNELS.glob("umbra_*"):
        assert not re.search(r"[(,=]\s*\[[&=]?\]\s*\(", path.read_text()), path
