"""A layer's inputs to the host: activations and routing are written to mapped memory by one kernel. The stream rings
the doorbell after it (csrc/bridge.cpp), which was measured to be as fast as a kernel that rings."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _publish(
    x, x_out, x_count, ids, ids_out, weights, weights_out, pairs, places, here, places_out, experts, BLOCK: tl.constexpr
):
    """Each program copies a block of each tensor."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_out + i, tl.load(x + i, i < x_count), i < x_count)
    tl.store(ids_out + i, tl.load(ids + i, i < pairs).to(tl.int32), i < pairs)
    weight = tl.load(weights + i, i < pairs)
    tl.store(weights_out + i, weight.to(weights_out.dtype.element_ty), i < pairs)
    row = tl.load(places + i, i < experts, other=0, volatile=True)
    tl.store(here + i, row, i < experts)
    tl.store(places_out + i, tl.where(row < 0, -1, 0), i < experts)


def publish(given: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Copies x, ids (as int32), weights and places to `out`: mapped x, ids, weights and places (int32, below 0: not
    resident), and last a snapshot of `places` on the device."""
    x, ids, weights, places = given
    x_out, ids_out, weights_out, places_out, here = out
    programs = triton.cdiv(max(x.numel(), ids.numel(), places.numel()), BLOCK)
    _publish[(programs,)](
        x,
        x_out,
        x.numel(),
        ids,
        ids_out,
        weights,
        weights_out,
        ids.numel(),
        places,
        here,
        places_out,
        places.numel(),
        BLOCK=BLOCK,
        num_warps=4,
    )
