"""Chooses the chunk size of prompts where the experts that a device misses are copied to it for each chunk anew: the
fewer chunks, the less is copied."""

import dataclasses
from bisect import bisect_left

from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.plan.shadows import arena_of, sizes_of
from umbra.executor.platform.ascend.plan.memory import Plan, make_plan

STEP = 1024  # tokens; chunks are multiples of it


def with_chunk(case: Case, rank: int = 0) -> Case:
    """The case with the largest chunk for which its device has memory, if it leaves that open and copies experts for
    prompts. All ranks choose the same, as sizes are counted, not measured; rank 0 prints it."""
    offload = case.offload_config
    copies = (
        offload.mode not in ("none", "resident") and offload.stream_tokens != 0 and not PLATFORMS[case.platform].is_host
    )
    if not copies or case.data_config.chunked_prefill_size or plan_with_arena(case).left >= 0:
        return case
    sizes = range(STEP, case.prefill_tokens, STEP)
    fitting = bisect_left(sizes, True, key=lambda tokens: plan_with_arena(_in_chunks(case, tokens)).left < 0)
    tokens = STEP * max(fitting, 1)
    if rank == 0:
        print(f"case {case.name}: prompts come in chunks of {tokens:,} tokens, the largest that fit into memory")
    return _in_chunks(case, tokens)


def plan_with_arena(case: Case) -> Plan:
    """The plan of a case with shadow experts, as many of them resident as may be where `slots` is left open."""
    sizes, slots = sizes_of(case), case.offload_config.slots
    *_, parts = arena_of(case, sizes, sizes.split.experts if slots is None else slots)
    return make_plan(case, parts)


def _in_chunks(case: Case, tokens: int) -> Case:
    return dataclasses.replace(case, data_config=dataclasses.replace(case.data_config, chunked_prefill_size=tokens))
