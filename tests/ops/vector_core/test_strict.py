"""The kernels with the macros of the real headers, each in a form that makes the mistakes that it hides errors."""

import re

import pytest

from tests.fakes.ascend_c import check, clang
from tests.fakes.ascend_c.launch import KERNELS

pytestmark = pytest.mark.skipif(not clang(), reason="needs clang++, which test.sh installs")

MISTAKES = {  # code: what clang says
    "struct Two { GM_ADDR a, b; };": "field may not be qualified with an address space",
    "__aicore__ void kept(const GM_ADDR at) { auto p = reinterpret_cast<__gm__ half*>(at); }": "reinterpret_cast fr",
    "__aicore__ void generic(GM_ADDR at) { auto p = reinterpret_cast<half*>(at); }": "reinterpret_cast from",
    "__aicore__ void local(uint8_t* at) { GlobalTensor<uint8_t>().SetGlobalBuffer(at); }": "cannot initialize a param",
    "int ours() { return 1; }\n__aicore__ int calls() { return ours(); }": "no matching function for call to 'ours'",
    '__aicore__ void out() { std::stoi("1"); }': "no matching function for call to 'stoi'",
    "__aicore__ void frees(TQue<TPosition::VECIN, 1>& q) { q.FreeTensor(q.DeQue<half>()); }": "no matching member func",
}


@pytest.mark.parametrize("kernels", ["umbra_[fg]*.cpp", "umbra_unpack_*.cpp"])  # names of the two kinds collide
def test_kernels(kernels: str) -> None:
    sources = sorted(KERNELS.glob(kernels))
    assert sources
    assert check("".join(f'#include "{path}"\n' for path in sources)) == ""


def test_mistakes() -> None:
    code = [line for mistake in MISTAKES for line in mistake.split("\n")]
    said = check("\n".join(["using namespace AscendC;", *code]))
    errors = {int(line): text for line, text in re.findall(r"<stdin>:(\d+):\d+: error: (.*)", said)}
    at = 1
    for mistake, complaint in MISTAKES.items():
        at += mistake.count("\n") + 1
        assert errors.get(at, "").startswith(complaint), (mistake, said)
    assert len(errors) == len(MISTAKES), said


def test_no_lambdas() -> None:
    """CANN's own sources mark them with an attribute of its compiler, or they are functions of the host."""
    for path in KERNELS.glob("umbra_*"):
        assert not re.search(r"[(,=]\s*\[[&=]?\]\s*\(", path.read_text()), path
