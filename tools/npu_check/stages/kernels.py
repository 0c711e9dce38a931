"""Stage 4: Umbra's own operators of the vector cores, against their reference in float64; then their times."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch_npu
from torch import Tensor

from tests.fakes.ascend_c import TwinError
from tests.fakes.ascend_c.launch import launch
from umbra.ops.ascend import moe, vector_core
from umbra.ops.ascend.grouped import COUNTS
from umbra.ops.ascend.tiles import TileBanks
from umbra.ops.ascend.vector_core import calls, reference
from umbra.ops.ascend.vector_core.blocks import PLACE, BlockLayout
from umbra.ops.ascend.vector_core.signatures import ExpertChoice, InPlanes
from umbra.ops.ascend.weights import AscendExperts, AscendMatrix, Matrices
from umbra.ops.formats import Format
from umbra.tools.benchmarks import npu_layers
from umbra.tools.npu_check.numbers import SIZES, SMALL, WHOLE, Size, fused_values, require
from umbra.tools.npu_check.outcome import Check, Passed, Skipped

NPU = torch.device("npu")
TOLERANCE = {True: 0.01, False: 0.02}  # with float sums and with sums in half, relative to the result's norm
BATCHES = (1, 2, 4, 8)
LAYERS, ROUNDS, READ_BYTES = 16, 20, 1 << 30
FEW, ROWS = 8, 4  # experts that are unpacked, rows of each in a product
ND = 2  # the format that is not tiled


def checks(logs: Path) -> list[Check]:
    listed = []
    for size in SIZES:
        for name, make in KERNELS.items():
            for float_sums in (False, True):
                sums = "float sums" if float_sums else "sums in half"
                listed.append(Check(f"{name}, {size.name}, {sums}", partial(run, make, size, float_sums)))
    listed += [Check(f"unpack_w4a16, {size.name}", partial(unpacked, size)) for size in SIZES]
    listed.append(Check("fused_moe_w4a16, small, bits of the twin", as_twin))
    return [*listed, Check("times beside npu_grouped_matmul, 30B", times)]


def run(make: Callable[[Size, int, bool, bool], tuple[Tensor, Tensor]], size: Size, float_sums: bool) -> Passed:
    """With zero points and without, for 1 and 8 tokens."""
    torch.manual_seed(0)
    npu_layers.start(vector_core.EXTENSION)
    errors = [
        require(f"{batch} tokens, zero points {zeros}", *make(size, batch, zeros, float_sums), TOLERANCE[float_sums])
        for batch in (1, 8)
        for zeros in (False, True)
    ]
    return Passed(f"error {max(errors):.2g}", {"error": max(errors)})


def as_twin() -> Passed:
    """The kernel's bits are those of its twin on the host, but for what a fused MulAddDst changes."""
    torch.manual_seed(0)
    npu_layers.start(vector_core.EXTENSION)
    changed = 0
    for batch, zeros, float_sums in product((1, 8), (False, True), (False, True)):
        experts, (x, ids, weights) = experts_of(SMALL, zeros), tokens_of(SMALL, batch)
        result = calls.moe(x.to(NPU), weights.to(NPU), ids.to(NPU), experts, None, float_sums)
        planes = *on_host(experts.w13)[:3], *on_host(experts.w2)[:3]
        try:
            twin, _ = launch("fused_moe", x, *planes, ids, weights, attributes=(32, 32, float_sums))
        except TwinError as error:
            raise Skipped(f"the twin does not run here: {str(error).splitlines()[0]}") from None
        changed += fused_values(f"{batch} tokens, zero points {zeros}, float sums {float_sums}", result, twin)
    text = "equal" if not changed else f"equal but for {changed} values: this device fuses MulAddDst of floats"
    return Passed(text, {"fused_values": changed})


def times() -> Passed:
    """Each way in one captured graph of layers with different weights; before that, both must agree."""
    npu_layers.start(vector_core.EXTENSION)
    sizes = WHOLE.hidden, WHOLE.inner, WHOLE.experts, WHOLE.top_k
    shape = npu_layers.LayerShape(*sizes, group=32, layers=LAYERS, dtype="bfloat16")
    rows = list(npu_layers.measure(shape, BATCHES, ROUNDS, READ_BYTES))
    text = ", ".join(f"{row['batch']}: {row['custom_us']:.1f} us ({row['speed_up']:.2f} x)" for row in rows)
    return Passed(f"batch {text}; reads {max(row['limit_gbps'] for row in rows):.0f} GB/s", {"kernel_rows": rows})


def gemv(size: Size, batch: int, zeros: bool, float_sums: bool) -> tuple[Tensor, Tensor]:
    matrix = AscendMatrix(2 * size.inner, size.hidden, Format("q4", 32, zeros), torch.bfloat16, NPU, in_planes=True)
    matrix.fill(0, torch.randn(2 * size.inner, size.hidden) + 0.3)
    x = torch.randn(batch, size.hidden).bfloat16()
    result = calls.linear(x.to(NPU), matrix, None, float_sums)
    return result, reference.gemv_w4a16(x, on_host(matrix), precise=True)


def experts_of(size: Size, zeros: bool) -> AscendExperts:
    shape = npu_layers.LayerShape(size.hidden, size.inner, size.experts, size.top_k, 32, 1, "bfloat16")
    experts = npu_layers.random_experts(shape, NPU, in_planes=True)
    if zeros:
        for plane in (experts.w13, experts.w2):
            if plane.scales is not None:
                plane.offsets = torch.randint(-7, 8, plane.scales.shape).to(plane.scales)
    return experts


def on_host(plane: Matrices) -> InPlanes:
    if plane.scales is None:
        raise TypeError("the matrix is not quantised")
    offsets = None if plane.offsets is None else plane.offsets.cpu()
    return InPlanes(plane.data.cpu(), plane.scales.cpu(), offsets, plane.format.group)


def expected(x: Tensor, experts: AscendExperts, ids: Tensor, weights: Tensor) -> Tensor:
    return reference.fused_moe_w4a16(x, on_host(experts.w13), on_host(experts.w2), ids, weights, precise=True)


def tokens_of(size: Size, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids (an id below zero is skipped), weights"""
    ids = torch.stack([torch.randperm(size.experts)[: size.top_k] for _ in range(batch)]).int()
    ids[0, -1] = -1
    return torch.randn(batch, size.hidden).bfloat16(), ids, torch.rand(batch, size.top_k).bfloat16()


def fused(size: Size, batch: int, zeros: bool, float_sums: bool) -> tuple[Tensor, Tensor]:
    experts, (x, ids, weights) = experts_of(size, zeros), tokens_of(size, batch)
    result = calls.moe(x.to(NPU), weights.to(NPU), ids.to(NPU), experts, None, float_sums)
    return result, expected(x, experts, ids, weights)


def scores(size: Size, batch: int, zeros: bool, float_sums: bool) -> tuple[Tensor, Tensor]:
    """Softmax as for Qwen3-MoE, with zero points sigmoids and a bias as for MiniMax-M2. Many scores are equal."""
    experts, x = experts_of(size, zeros), torch.randn(batch, size.hidden).bfloat16()
    of = torch.randn(batch, size.experts).round(decimals=1)
    of, bias = (of, 7 + torch.randn(size.experts)) if zeros else (of.bfloat16(), None)
    on = None if bias is None else bias.to(NPU)
    result = calls.moe_of_scores(x.to(NPU), of.to(NPU), on, size.top_k, zeros, experts, None, float_sums)
    planes, choice = (on_host(experts.w13), on_host(experts.w2)), ExpertChoice(size.top_k, zeros, 0)
    return result, reference.fused_moe_scores_w4a16(x, *planes, of, bias, choice, precise=True)


def slots(size: Size, batch: int, zeros: bool, float_sums: bool) -> tuple[Tensor, Tensor]:
    """Every third expert is not resident; the others are in slots in another order."""
    experts, (x, ids, weights) = experts_of(size, zeros), tokens_of(size, batch)
    layout = BlockLayout(size.inner, size.hidden, torch.bfloat16, 32, 32, zeros, in_planes=True)
    resident = [expert for expert in range(size.experts) if expert % 3]
    arena = torch.zeros(len(resident) * layout.block_bytes, dtype=torch.uint8, device=NPU)
    places = torch.full((size.experts,), -1, dtype=torch.int32)
    names = [n for which in ("13", "2") for n in (f"w{which}", f"s{which}", f"z{which}")]
    planes = [p for plane in (experts.w13, experts.w2) for p in (plane.data, plane.scales, plane.offsets)]
    kept = dict(zip(names, planes, strict=True))
    for slot, expert in enumerate(reversed(resident)):
        begin = slot * layout.block_bytes
        places[expert] = begin // PLACE
        for name, view in layout.views(arena[begin : begin + layout.block_bytes]).items():
            plane = kept[name]
            if plane is not None:
                view.copy_(plane[expert])
    on, by, chosen, table = (t.to(NPU) for t in (x, weights, ids, places))
    result = calls.moe_slots(on, by, chosen, arena, table, layout, None, float_sums)
    here = torch.where((ids >= 0) & (ids % 3 != 0), ids, -1)
    torch_npu.npu.synchronize()
    return result, expected(x, experts, here, weights)


def unpacked(size: Size) -> Passed:
    """The values of experts, in rows and in tiles; then a grouped product by the tiles."""
    torch.manual_seed(0)
    npu_layers.start(vector_core.EXTENSION)
    torch_npu.npu.config.allow_internal_format = True  # tiles
    errors = []
    for zeros in (False, True):
        experts = experts_of(replace(size, experts=min(size.experts, FEW)), zeros)
        for name, plane in (("w13", experts.w13), ("w2", experts.w2)):
            banks = TileBanks(torch.bfloat16)
            banks.add(plane)
            values = reference.unpack_w4a16(on_host(plane), name == "w2", name == "w13")  # (E, N, K)
            x = torch.randn(len(values), ROWS, plane.columns).bfloat16()
            counts = torch.full((len(values),), ROWS, device=NPU)
            product = moe.grouped(x.flatten(0, 1).to(NPU), plane, counts, COUNTS)
            (bank,) = (bank.bank for bank in banks.banks.values())
            tiles = torch_npu.npu_format_cast(input=bank, acl_format=ND, customize_dtype=None)
            what = f"{name}, zero points {zeros}"
            require(f"{what}: rows", calls.unpacked(plane).transpose(-2, -1), values, 0.0)
            require(f"{what}: tiles", tiles, values, 0.0)
            expected = (x.double() @ values.double().transpose(-2, -1)).flatten(0, 1)
            errors.append(require(f"{what}: product", product, expected, TOLERANCE[True]))
    return Passed(f"values equal, error of a product {max(errors):.2g}", {"error": max(errors)})


KERNELS = {
    "gemv_w4a16": gemv,
    "fused_moe_w4a16": fused,
    "fused_moe_scores_w4a16": scores,
    "fused_moe_slots_w4a16": slots,
}
