"""A layer's inputs to the host: activations and routing are written to mapped memory by one kernel, which then rings
the doorbell (csrc/bridge.cpp)."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["number"])
def _publish(
    x,
    x_out,
    x_count,
    ids,
    ids_out,
    weights,
    weights_out,
    pairs,
    places,
    here,
    places_out,
    experts,
    arrived,
    bell,
    number,
    RINGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program copies a block of each tensor. The program that is the last to arrive rings: it has acquired what
    the others released to the device, and its release to the system passes that on."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_out + i, tl.load(x + i, i < x_count), i < x_count)
    tl.store(ids_out + i, tl.load(ids + i, i < pairs).to(tl.int32), i < pairs)
    weight = tl.load(weights + i, i < pairs)
    tl.store(weights_out + i, weight.to(weights_out.dtype.element_ty), i < pairs)
    row = tl.load(places + i, i < experts, other=0, volatile=True)
    tl.store(here + i, row, i < experts)
    tl.store(places_out + i, tl.where(row < 0, -1, 0), i < experts)
    if RINGS:
        tl.debug_barrier()
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
        if before == tl.num_programs(0) - 1:
            tl.store(arrived, 0)
            tl.atomic_xchg(bell, number, sem="release", scope="sys")


def publish(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    places: Tensor,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    arrived: Tensor,
    bell: Tensor,
    number: int,
) -> None:
    """Copies x, ids (as int32), weights and places to `out`: mapped x, ids, weights and places (int32, below 0: not
    resident), and last a snapshot of `places` on the device. Then writes `number` to `bell`, unless it is 0."""
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
        arrived,
        bell,
        number,
        RINGS=number > 0,
        BLOCK=BLOCK,
        num_warps=4,
    )
