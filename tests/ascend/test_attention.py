"""L2: attention over windows and with sinks, by both versions of the fused operator, against plain masks."""

from array import array
from typing import Any

import pytest
import torch

from tests.ascend import npu_on_cpu  # noqa: F401 (registers)
from umbra.ops import reference
from umbra.ops.ascend.cann import ALL_ABILITIES, Abilities, abilities
from umbra.ops.ascend.ops import AscendOps

CPU, PAGE, HEADS, KV, DIM, SCALE = torch.device("cpu"), 16, 4, 2, 64, 0.2
STEPS = {"decode": ((1, 1, 1), (5, 48, 70)), "prefill": ((4, 23, 1), (4, 50, 70))}  # new tokens, lengths of sequences


def attended(
    dtype: torch.dtype, can: Abilities, step: str, window: int | None, sinks: bool, off_by: int = 0
) -> torch.Tensor:
    """The errors of the Ascend ops, of which pages before the windows hold NaN, beside the reference with a window that
    is longer by `off_by`."""
    torch.manual_seed(2)
    ops: Any = AscendOps(dtype, CPU, "fusion_v2", can=can)
    new, lengths = STEPS[step]
    tables = torch.arange(3 * 5, dtype=torch.int32).view(3, 5)
    slots = [int(tables[s, at // PAGE]) * PAGE + at % PAGE for s, n in enumerate(lengths) for at in range(n)]
    k, v = torch.randn(2, len(slots), KV, DIM).to(dtype)
    q, sink = torch.randn(sum(new), HEADS, DIM).to(dtype), torch.linspace(-2, 3, HEADS).to(dtype)
    starts = array("q", torch.tensor([0, *new]).cumsum(0).tolist())
    results = []
    for own in (ops, reference):
        caches = [own.kv_cache(15, PAGE, KV, DIM, dtype, CPU) for _ in "kv"]
        paged = own.paging(array("q", slots), tables, starts, array("q", lengths), PAGE)
        own.write_kv(k, v, *caches, paged.slot_mapping)
        if own is ops:
            for row, count, length in zip(tables, new, lengths, strict=True):
                for cache in caches:
                    cache[row[: max(0, length - count - (window or length) + 1) // PAGE].long()] = torch.nan
        seen = window + off_by if window and own is reference else window
        results.append(own.attention(q, *caches, paged, SCALE, seen, sink if sinks else None).float())
    return (results[0] - results[1]).abs()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("dtype", "can"),
    [
        (torch.bfloat16, ALL_ABILITIES),
        (torch.bfloat16, abilities(None)),
        (torch.float16, abilities("8.5.0")),
        (torch.float32, ALL_ABILITIES),
    ],
    ids=["learned", "corrected", "half", "single"],
)
def test_windows_and_sinks(dtype: torch.dtype, can: Abilities, step: str) -> None:
    bound = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for window, sinks in ((17, True), (17, False), (None, True)):
        assert attended(dtype, can, step, window, sinks).max() < bound
    for off_by in (-1, 1):  # of other implementations, more than one had it
        assert attended(dtype, can, step, 17, True, off_by).max() > 5 * bound
