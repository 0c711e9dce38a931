"""The vector-core ops on the fake NPU: the calls that the torch extension makes to the device, and its refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401
from torch import Tensor

from tests.ascend.extension import load_extension
from tests.ascend.log import device_log
from tests.ascend.ranks import run_ranks
from umbra.ops.ascend.vector_core import calls
from umbra.ops.ascend.vector_core.blocks import BlockLayout
from umbra.ops.ascend.vector_core.planes import planes_of

FUSED, SLOTS, GEMV, UNPACK = "fused_moe_w4a16", "fused_moe_slots_w4a16", "gemv_w4a16", "unpack_w4a16"
SCORES = "fused_moe_scores_w4a16"
Arguments = dict[str, Any]  # tensors or None, and numbers
BF16, INT, BYTE = torch.bfloat16, torch.int32, torch.uint8
T, TOP_K, E, H, INNER = 2, 3, 4, 128, 96  # INNER: of Qwen3-30B-A3B at TP 8


@pytest.fixture(autouse=True)
def extension() -> None:
    load_extension()


def npu(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="npu")


def matrix(rows: int, columns: int, group: int, *lead: int, ordered: bool = False) -> tuple[Tensor, Tensor]:
    planes = planes_of(rows, group, ordered)
    return npu(*lead, *planes.words_shape(columns), dtype=BYTE), npu(*lead, *planes.scales_shape(columns))


def fused(zeros: bool = False) -> Arguments:
    (w13, s13), (w2, s2) = matrix(H, 2 * INNER, 64, E), matrix(INNER, H, 32, E, ordered=True)
    ids, weights = npu(T, TOP_K, dtype=INT), npu(T, TOP_K)
    z13, z2 = (s13, s2) if zeros else (None, None)
    x = npu(T, H)
    return dict(x=x, w13=w13, s13=s13, z13=z13, w2=w2, s2=s2, z2=z2, ids=ids, weights=weights, group=64, group2=32)


def scores(zeros: bool = False) -> Arguments:
    bank = {name: given for name, given in fused(zeros).items() if name[0] in "xwsz" and name != "weights"}
    choice = dict(scores=npu(T, 40, dtype=torch.float32), bias=npu(40, dtype=torch.float32) if zeros else None)
    return bank | choice | dict(top_k=TOP_K, sigmoid=zeros, first_expert=36, group=64, group2=32)


def gemv(zeros: bool = False) -> Arguments:
    w, scales = matrix(H, 64, 128)
    return dict(x=npu(T, H), w=w, scales=scales, zeros=scales if zeros else None, group=128)


def unpack(zeros: bool = False) -> Arguments:
    w, scales = matrix(INNER, 64, 32, E, ordered=True)
    return dict(w=w, scales=scales, zeros=scales if zeros else None, group=32, ordered=True, pairs=False)


def slots(zeros: bool = False) -> Arguments:
    arena, places = npu(9999, dtype=torch.uint8), npu(E, dtype=INT)
    ids, weights = npu(T, TOP_K, dtype=INT), npu(T, TOP_K)
    sizes = dict(inner=INNER, group=64, group2=32, zeros=zeros)
    return dict(x=npu(T, H), arena=arena, places=places, ids=ids, weights=weights, **sizes)


OPS: dict[str, tuple[Callable[[bool], Arguments], str, tuple[int, ...]]] = {
    FUSED: (fused, "aclnnUmbraFusedMoeW4a16", (T, H)),
    SCORES: (scores, "aclnnUmbraFusedMoeScoresW4a16", (T, H)),
    SLOTS: (slots, "aclnnUmbraFusedMoeSlotsW4a16", (T, H)),
    GEMV: (gemv, "aclnnUmbraGemvW4a16", (T, 64)),
    UNPACK: (unpack, "aclnnUmbraUnpackW4a16", (E, 64, INNER)),
}


def call(op: str, arguments: Arguments, float_sums: bool = False) -> Tensor:
    return getattr(torch.ops.umbra, op)(*arguments.values(), **({"float_sums": True} if float_sums else {}))


def line(kernel: str, arguments: list[Tensor | int | None]) -> str:
    """The line of the log; absent or false arguments are not logged."""
    return " ".join([kernel, *(told(given) for given in arguments if isinstance(given, Tensor) or given)])


def told(given: Tensor | int) -> str:
    if isinstance(given, Tensor):
        return f"({','.join(map(str, given.shape))}){str(given.dtype).removeprefix('torch.')}"
    return str(given).lower()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_an_op_is_one_kernel(op: str, zeros: bool) -> None:
    make, kernel, shape = OPS[op]
    arguments = make(zeros)
    with device_log() as log:
        y = call(op, arguments)
    assert (y.shape, y.dtype, y.device.type) == (shape, BF16, "npu")
    assert log.lines == [line(kernel, [*arguments.values(), y])]
    if op != UNPACK:
        with device_log() as log:
            call(op, arguments, float_sums=True)
        inputs = line(kernel, [*arguments.values()])
        assert log.lines == [f"{inputs} true {line('', [y]).strip()}"]
    meta = call(op, {name: t.to("meta") if isinstance(t, Tensor) else t for name, t in arguments.items()})
    assert (meta.shape, meta.dtype) == (y.shape, y.dtype)


def fused_alone(rank: int) -> None:
    load_extension()
    call(FUSED, fused())


def test_without_the_package_of_operators_the_op_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_CUSTOM_OPP_PATH")
    with pytest.raises(AssertionError, match=r"aclnnUmbraFusedMoeW4a16.* not in"):
        run_ranks(fused_alone, 1, fresh=True)


def other(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {**arguments, name: change(arguments[name])}


@pytest.mark.parametrize(
    ("op", "change", "complaint"),
    [
        (GEMV, other("x", lambda x: x.float()), "x: Float: must be float16 or bfloat16"),
        (GEMV, other("x", lambda x: x[0]), r"x: \[128\]: must be \(tokens, K\)"),
        (GEMV, other("x", lambda x: x[:1].expand(9, H)), r"x: \[9, 128\]: must be 8 tokens at most"),
        (GEMV, other("x", lambda x: x[:, :120]), r"x: \[2, 120\]: K must be a multiple of 32"),
        (GEMV, other("x", lambda x: npu(T, 8224)), r"x: \[2, 8224\]: K must be 8192 at most"),
        (GEMV, other("w", lambda w: w.long()), "w: Long: must be Byte"),
        (GEMV, other("w", lambda w: w.mT.contiguous().mT), r"w: \[1, 64, 64\] of strides \[4096, 1, 64\]: must be co"),
        (GEMV, other("w", lambda w: w[:, :60].contiguous()), r"w: \[1, 60, 64\]: N must be a multiple of 8"),
        (GEMV, other("scales", lambda s: s.half()), "scales: Half: must be BFloat16"),
        (GEMV, other("scales", lambda s: npu(1, 64, 16)), r"scales: \[1, 64, 16\]: .*, ending in \(1, 64, 8\)"),
        (GEMV, lambda a: {**a, "zeros": npu(2, 64)}, r"zeros: \[2, 64\]: must be as scales \[1, 64, 8\]"),
        (FUSED, other("ids", lambda i: i.long()), "ids: Long: must be int32"),
        (FUSED, other("ids", lambda i: i[:, :1].expand(T, 129)), r"ids: \[2, 129\]: must be 256 at most"),
        (FUSED, other("w13", lambda w: npu(8193, 1, 8, 64, dtype=BYTE)), r"w13: \[8193, 1, 8, 64\]: must be 8192 "),
        (FUSED, other("weights", lambda w: w.float()), "weights: Float: must be BFloat16"),
        (SLOTS, other("arena", lambda a: a.int()), "arena: Int: must be Byte"),
        (SLOTS, other("arena", lambda a: a[::2]), r"arena: \[5000\] of strides \[2\]: must be contiguous"),
        (SLOTS, other("places", lambda p: p.long()), "places: Long: must be Int"),
        (SLOTS, other("places", lambda p: npu(8193, dtype=INT)), r"places: \[8193\]: must have one dimension"),
        (SLOTS, other("inner", lambda _: 4128), "inner: 4128: must be a multiple of 32, 4096 at most"),
        (SLOTS, other("group", lambda _: 256), "group: 256: must be 32, 64 or 128, and divide 128"),
        (SCORES, other("scores", lambda s: s.half()), "scores: Half: must be float32 or BFloat16"),
        (SCORES, other("scores", lambda s: npu(T, 513)), r"scores: \[2, 513\]: .* with 512 experts at most"),
        (SCORES, other("top_k", lambda _: 9), "top_k: 9: must be 1 to 8"),
        (SCORES, lambda a: a | dict(scores=npu(T, 4), top_k=5, first_expert=0), "top_k: 5: .* at most the 4 experts"),
        (SCORES, other("first_expert", lambda _: 37), "first_expert: 37: this and the 3 experts after it"),
        (SCORES, other("bias", lambda _: npu(40, dtype=torch.float32)), "bias: must be absent where scores do not"),
        (SCORES, lambda a: a | dict(bias=npu(40), sigmoid=True), "bias: BFloat16: must be Float"),
        (FUSED, lambda a: {**a, "z2": a["s2"]}, "z2: given: must be given where z13 is"),
        (FUSED, lambda a: a | dict(zip(("w2", "s2"), matrix(INNER, H, 32, 3), strict=True)), r"w2: \[3, 1, 128, 48\]"),
        (UNPACK, lambda a: a | dict(pairs=True, w=npu(E, 1, 40, 48, dtype=BYTE), scales=npu(E, 1, 40, 8)), "of 32"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(
    op: str, change: Callable[[Arguments], Arguments], complaint: str
) -> None:
    arguments = change(OPS[op][0](False))
    with device_log() as log, pytest.raises((RuntimeError, TypeError), match=complaint) as refused:
        call(op, arguments)
    assert "\n" not in str(refused.value)
    assert not [text for text in log.lines if "Umbra" in text]


def test_weights_on_the_host_are_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected NPU tensor"):
        call(GEMV, other("w", lambda w: w.cpu())(gemv()))


def test_the_backend_gives_the_layout_of_a_block() -> None:
    """An expert's number is relative to the rank's first."""
    layout = BlockLayout(INNER, H, BF16, 64, 32, zeros=True)
    x, arena, places, ids, weights, *_ = slots().values()
    with device_log() as log:
        y = calls.moe_slots(x, weights, ids, arena, places, layout, 3, True)
    assert "Sub" in log.kernels()[0]
    assert log.lines[-1] == line(
        "aclnnUmbraFusedMoeSlotsW4a16", [x, arena, places, ids, weights, INNER, 64, 32, True, True, y]
    )
