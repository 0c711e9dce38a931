"""Prints a memory plan and refuses a case that does not fit."""

from umbra.base.errors import UserError
from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.units import GB
from umbra.executor.plan.activations import Part
from umbra.executor.plan.host_memory import check_host_memory, memory_limit
from umbra.executor.plan.sketch import cache_of, sketch_of, weights_of
from umbra.executor.platform.ascend.plan.memory import (
    ARENA,
    CACHE,
    GRAPHS,
    HCCL,
    PREFILL,
    REST,
    WEIGHTS,
    Plan,
    make_plan,
)
from umbra.executor.run.chunk_plan import with_chunk

REMEDIES = {
    WEIGHTS: "raise world_size, or set quantization.method: q4",
    CACHE: "lower batch_size, input_max_len or max_new_tokens",
    ARENA: "lower offload_config.arena_mb",
    PREFILL: "lower chunked_prefill_size (0: no limit)",
    GRAPHS: "lower batch_size",
    HCCL: "lower hccl_config.buffer_mb",
    REST: "use dies with more memory",
}


def show_plan(case: Case) -> None:
    """Prints what the case needs, for `--plan`; raises UserError if that is more than a device has."""
    arena: list[Part] = []
    case = with_chunk(case)
    if case.offload_config.mode != "none":
        from umbra.executor.plan.shadows import show_offload_plan

        arena = show_offload_plan(case)
        print()
    if PLATFORMS[case.platform].is_host:
        return None if arena else show_host_plan(case)
    plan = make_plan(case, arena)
    print_plan(plan)
    check_fits(plan)


def show_host_plan(case: Case) -> None:
    """Prints the weights and the KV cache of a case whose device is the CPU, next to this machine's memory."""
    sketch = sketch_of(case)
    parts, cache = weights_of(sketch.model), cache_of(sketch)
    weights, (limit, of) = sum(part.nbytes for part in parts), memory_limit()
    _print_head(case)
    print(
        "Memory of each rank, counted, not measured; a rank's program takes about 0.5 GB besides. 1 GB = 2^30 bytes.\n"
    )
    _row("weights", weights)
    for part in parts:
        _part(part)
    _row("KV cache", cache.nbytes, cache.how)
    _row("all ranks", (weights + cache.nbytes) * case.world_size)
    _row("memory", limit, of)
    check_host_memory(case, case.world_size, sketch)


def print_plan(plan: Plan) -> None:
    case = plan.case
    _print_head(case)
    print("Memory of one rank, counted, not measured. No rank holds more than rank 0. 1 GB = 2^30 bytes.")
    for name, parts in plan.sections.items():
        print()
        _row(name, plan.of(name))
        for part in parts:
            _part(part)
    print()
    _row("total", plan.total)
    _row(f"ascend_config.memory_gb: {case.ascend_config.memory_gb}", case.ascend_config.memory_gb * GB)
    _row("left", plan.left, f"{plan.tokens_left:,} more tokens of KV cache" if plan.left > 0 else "does not fit")
    print(f"\nA decode step of {case.data_config.batch_size} sequence(s) reads on each rank:")
    for part in plan.decode:
        _part(part)
    _row("in all", sum(part.nbytes for part in plan.decode))


def check_fits(plan: Plan) -> None:
    if plan.left >= 0:
        return
    largest = max(plan.sections, key=plan.of)
    raise UserError(
        f"case {plan.case.name}: {plan.total / GB:.2f} GB are {-plan.left / GB:.2f} GB more than "
        f"ascend_config.memory_gb: {plan.case.ascend_config.memory_gb}; the largest share is {largest} with "
        f"{plan.of(largest) / GB:.2f} GB: {REMEDIES[ARENA if ARENA in plan.sections else largest]}"
    )


def _print_head(case: Case) -> None:
    q, format = case.quantization, case.model_config.dtype
    if q.method in ("q8", "q4"):
        format += f", {q.method} in groups of {q.group_size}" + (" with zero points" if q.zero_points else "")
    if q.rest != "none":
        format += f", rest in {q.rest}"
    print(f"case {case.name}: {case.platform}, {case.exe_mode}, {case.world_size} rank(s), {format}")


def _part(part: Part) -> None:
    if part.nbytes:
        _row(f"  {part.name}", part.nbytes, part.how)
    else:
        print(f"  {part.name}")


def _row(name: str, nbytes: int, how: str = "") -> None:
    print(f"{name:<36} {nbytes:>18,} {nbytes / GB:>8.3f} GB  {how}".rstrip())
