"""A mixture of experts in slots, over the reference's op on the CPU, equals that of the same experts side by side."""

import pytest
import torch

from ops.ascend.vector_core import calls
from ops.ascend.vector_core.blocks import PLACE, BlockLayout
from ops.ascend.weights import AscendExperts
from ops.format import Format
from tests.ascend import umbra_on_cpu  # noqa: F401 (registers the ops)


@pytest.mark.parametrize("zeros", [False, True])
def test_the_planes_of_ascend_experts_in_slots(zeros: bool) -> None:
    torch.manual_seed(0)
    count, inner, hidden, first = 4, 64, 128, 6
    experts = AscendExperts(
        count, inner, hidden, Format("q4", 32, zeros), torch.float16, torch.device("cpu"), in_planes=True
    )
    for expert in range(count):
        for which in ("gate", "up", "down"):
            experts.fill(expert, which, torch.randn((hidden, inner) if which == "down" else (inner, hidden)))
    w13, w2 = experts.w13, experts.w2
    kept = dict(w13=w13.data, s13=w13.scales, z13=w13.offsets, w2=w2.data, s2=w2.scales, z2=w2.offsets)
    layout = BlockLayout(inner, hidden, torch.float16, 32, 32, zeros, in_planes=True)
    arena = torch.full((5 * layout.block_bytes,), 0xFF, dtype=torch.uint8)
    places = torch.tensor([3, 0, -1, 1], dtype=torch.int32) * (layout.block_bytes // PLACE)
    for expert, place in enumerate(places.tolist()):
        if place >= 0:
            for name, view in layout.views(arena[place * PLACE :][: layout.block_bytes]).items():
                view.copy_(kept[name][expert])  # type: ignore[index]
    x, ids = torch.randn(3, hidden).half(), torch.tensor([[6, 7, 8], [9, 5, 10], [8, 2, 8]], dtype=torch.int32)
    weights = torch.rand(3, 3).half()
    mine = calls.moe_slots(x, weights, ids, arena, places.clamp(-1), layout, first, False)
    elsewhere = torch.where(ids == 8, -1, ids)  # not resident
    torch.testing.assert_close(mine, calls.moe(x, weights, elsewhere, experts, first, False), rtol=0, atol=0)
    assert not mine[2].any()
