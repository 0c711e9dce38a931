"""Stage 4: Umbra's own operators of the vector cores, against their reference in float64; then their times."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch_npu
from torch import Tensor

from benchmarks import npu_layers
from ops.ascend import vector_core
from ops.ascend.vector_core import calls, reference
from ops.ascend.vector_core.blocks import PLACE, BlockLayout
from ops.ascend.weights import AscendExperts, AscendMatrix
from ops.format import Format
from tools.npu_check.numbers import require
from tools.npu_check.outcome import Check, Found
from tools.npu_check.size import SIZES, WHOLE, Size

NPU = torch.device("npu")
TOLERANCE = {False: 0.01, True: 0.02}  # with float sums and with half sums, relative to the result's norm
BATCHES = (1, 2, 4, 8)
LAYERS, ROUNDS, READ_BYTES = 16, 20, 1 << 30


def checks(logs: Path) -> list[Check]:
    found = []
    for size in SIZES:
        for name, make in KERNELS.items():
            for half_sums in (False, True):
                sums = "half" if half_sums else "float"
                found.append(Check(f"{name}, {size.name}, {sums} sums", partial(run, make, size, half_sums)))
    return [*found, Check("times beside npu_grouped_matmul, 30B", times)]


def run(make: Callable[[Size, int, bool, bool], tuple[Tensor, Tensor]], size: Size, half_sums: bool) -> Found:
    """With zero points and without, for 1 and 8 tokens."""
    torch.manual_seed(0)
    npu_layers.start(vector_core.EXTENSION)
    errors = [
        require(f"{batch} tokens, zero points {zeros}", *make(size, batch, zeros, half_sums), TOLERANCE[half_sums])
        for batch in (1, 8)
        for zeros in (False, True)
    ]
    return Found(f"error {max(errors):.2g}", {"error": max(errors)})


def times() -> Found:
    """Each way in one captured graph of layers with different weights; before that, both must agree."""
    npu_layers.start(vector_core.EXTENSION)
    sizes = WHOLE.hidden, WHOLE.inner, WHOLE.experts, WHOLE.top_k
    shape = npu_layers.Shape(*sizes, group=32, layers=LAYERS, dtype="bfloat16", half_sums=True)
    rows = list(npu_layers.measure(shape, BATCHES, ROUNDS, READ_BYTES))
    told = ", ".join(f"{row['batch']}: {row['custom_us']:.1f} us ({row['speed_up']:.2f} x)" for row in rows)
    return Found(f"batch {told}; reads {max(row['limit_gbps'] for row in rows):.0f} GB/s", {"kernel_rows": rows})


def gemv(size: Size, batch: int, zeros: bool, half_sums: bool) -> tuple[Tensor, Tensor]:
    matrix = AscendMatrix(2 * size.inner, size.hidden, Format("q4", 32, zeros), torch.bfloat16, NPU)
    matrix.fill(0, torch.randn(2 * size.inner, size.hidden) + 0.3)
    x = torch.randn(batch, size.hidden).bfloat16()
    result = calls.linear(x.to(NPU), matrix, None, half_sums)
    planes = [None if t is None else t.cpu() for t in (matrix.data, matrix.scales, matrix.offsets)]
    return result, reference.gemv_w4a16(x, *planes, precise=True)  # type: ignore[arg-type]


def experts_of(size: Size, zeros: bool) -> AscendExperts:
    shape = npu_layers.Shape(size.hidden, size.inner, size.experts, size.top_k, 32, 1, "bfloat16")
    experts = npu_layers.random_experts(shape, NPU)
    if zeros:
        for plane in (experts.w13, experts.w2):
            if plane.scales is not None:
                plane.offsets = torch.randint(-7, 8, plane.scales.shape).to(plane.scales)
    return experts


def on_host(experts: AscendExperts) -> list[Tensor | None]:
    planes = [p for plane in (experts.w13, experts.w2) for p in (plane.data, plane.scales, plane.offsets)]
    return [None if t is None else t.cpu() for t in planes]


def tokens_of(size: Size, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids (an id below zero is skipped), weights"""
    ids = torch.stack([torch.randperm(size.experts)[: size.top_k] for _ in range(batch)]).int()
    ids[0, -1] = -1
    return torch.randn(batch, size.hidden).bfloat16(), ids, torch.rand(batch, size.top_k).bfloat16()


def fused(size: Size, batch: int, zeros: bool, half_sums: bool) -> tuple[Tensor, Tensor]:
    experts, (x, ids, weights) = experts_of(size, zeros), tokens_of(size, batch)
    result = calls.moe(x.to(NPU), weights.to(NPU), ids.to(NPU), experts, None, half_sums)
    return result, reference.fused_moe_w4a16(x, *on_host(experts), ids, weights, precise=True)  # type: ignore[arg-type]


def slots(size: Size, batch: int, zeros: bool, half_sums: bool) -> tuple[Tensor, Tensor]:
    """Every third expert is not resident; the others are in slots in another order."""
    experts, (x, ids, weights) = experts_of(size, zeros), tokens_of(size, batch)
    layout = BlockLayout(size.inner, size.hidden, torch.bfloat16, 32, 32, zeros)
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
    on = [t.to(NPU) for t in (x, weights, ids)]
    result = calls.moe_slots(*on, arena, places.to(NPU), layout, None, half_sums)
    here = torch.where((ids >= 0) & (ids % 3 != 0), ids, -1)
    torch_npu.npu.synchronize()
    return result, reference.fused_moe_w4a16(x, *on_host(experts), here, weights, precise=True)  # type: ignore[arg-type]


KERNELS = {"gemv_w4a16": gemv, "fused_moe_w4a16": fused, "fused_moe_slots_w4a16": slots}
