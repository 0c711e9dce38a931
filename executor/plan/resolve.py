"""Makes a case whole before it is written for its ranks. Nothing changes it afterwards."""

import dataclasses
from bisect import bisect_left

from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS

STEP = 1024  # tokens of a prefill step are a multiple of it


def resolve(case: Case, silent: bool = False) -> Case:
    """The case with what it leaves open and only a count of memory can say: the tokens of a prefill step, if experts
    are copied for each to a device's own memory. The fewer steps a prompt takes, the less is copied, so it is the
    largest step for which the device has memory. Sizes are counted, not measured: every launcher chooses the same. A
    choice is printed unless `silent`. A whole case stays as it is."""
    offload, facts = case.offload_config, PLATFORMS[case.platform]
    copies = facts.plans_memory and offload.mode not in ("none", "resident") and offload.stream_tokens != 0
    if not copies or case.data_config.chunked_prefill_size:
        return case
    from umbra.executor.plan.shadows import plan_with_arena  # which imports torch

    if plan_with_arena(case).left >= 0:
        return case
    sizes = range(STEP, case.prefill_tokens, STEP)
    fitting = bisect_left(sizes, True, key=lambda tokens: plan_with_arena(with_prefill(case, tokens)).left < 0)
    tokens = STEP * max(fitting, 1)
    if not silent:
        print(f"case {case.name}: prompts come in chunks of {tokens:,} tokens, the largest that fit into memory")
    return with_prefill(case, tokens)


def with_prefill(case: Case, tokens: int) -> Case:
    """The case with prefill steps of at most `tokens` tokens of each data-parallel group."""
    return dataclasses.replace(case, data_config=dataclasses.replace(case.data_config, chunked_prefill_size=tokens))
