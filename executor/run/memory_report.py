"""Prints a memory plan and refuses a case that does not fit."""

from umbra.base.errors import UserError
from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.units import GB
from umbra.executor.plan.activations import PlanLine
from umbra.executor.plan.host_memory import check_host_memory, memory_limit
from umbra.executor.plan.memory import ARENA, MemoryPlan, device_gb, plan_memory
from umbra.executor.plan.resolve import resolve
from umbra.executor.plan.sketch import cache_of, sketch_of, weights_of


def show_plan(case: Case) -> None:
    """Prints what the case needs, for `--plan`; raises UserError if that is more than a device has."""
    arena, facts = list[PlanLine](), PLATFORMS[case.platform]
    case = resolve(case)
    if case.offload_config.mode != "none":
        from umbra.executor.plan.shadows import show_offload_plan

        arena = show_offload_plan(case)
        print()
    if not facts.plans_memory:
        return None if arena else show_host_plan(case)
    plan = plan_memory(case, arena)
    print_plan(plan)
    check_fits(plan)


def show_host_plan(case: Case) -> None:
    """Prints the weights and the KV cache of a case whose device computes in the host's memory, next to this
    machine's."""
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


def print_plan(plan: MemoryPlan) -> None:
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
    _row(_device_memory(case), device_gb(case) * GB)
    _row("left", plan.left, f"{plan.tokens_left:,} more tokens of KV cache" if plan.left > 0 else "does not fit")
    print(f"\nA decode step of {case.data_config.batch_size} sequence(s) reads on each rank:")
    for part in plan.decode:
        _part(part)
    _row("in all", sum(part.nbytes for part in plan.decode))


def check_fits(plan: MemoryPlan) -> None:
    if plan.left >= 0:
        return
    largest = max(plan.sections, key=plan.of)
    raise UserError(
        f"case {plan.case.name}: {plan.total / GB:.2f} GB are {-plan.left / GB:.2f} GB more than "
        f"{_device_memory(plan.case)}; the largest share is {largest} with {plan.of(largest) / GB:.2f} GB: "
        f"{plan.remedies[ARENA if ARENA in plan.sections else largest]}"
    )


def _device_memory(case: Case) -> str:
    return f"{PLATFORMS[case.platform].memory_key}: {device_gb(case)}"


def _print_head(case: Case) -> None:
    q, format = case.quantization, case.model_config.dtype
    if q.method in ("q8", "q4"):
        format += f", {q.method} in groups of {q.group_size}" + (" with zero points" if q.zero_points else "")
    if q.rest != "none":
        format += f", rest in {q.rest}"
    print(f"case {case.name}: {case.platform}, {case.exe_mode}, {case.world_size} rank(s), {format}")


def _part(part: PlanLine) -> None:
    if part.nbytes:
        _row(f"  {part.name}", part.nbytes, part.how)
    else:
        print(f"  {part.name}")


def _row(name: str, nbytes: int, how: str = "") -> None:
    print(f"{name:<36} {nbytes:>18,} {nbytes / GB:>8.3f} GB  {how}".rstrip())
