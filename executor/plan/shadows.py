"""The planner of shadow experts for a case: it gets the case's sizes and wishes, and `--plan` prints its predictions.

Sizes come from a model on PyTorch's meta device, so only the checkpoint's `config.json` is read.
"""

from typing import Any

from umbra.base.errors import UserError
from umbra.cpu_offload.manager import largest_of
from umbra.cpu_offload.memory.arena import Arena, extent_of
from umbra.cpu_offload.planner.choices import ArenaSplit
from umbra.cpu_offload.planner.choosing import ShadowedLayers, ShadowSizes, Wanted, choose
from umbra.cpu_offload.planner.hits import curve_of
from umbra.cpu_offload.planner.model import ExpertsShape
from umbra.cpu_offload.planner.planned_run import PlannedRun
from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.plan.activations import PlanLine
from umbra.executor.plan.arena_sizes import expert_frames, frames_of, make_arena, set_pages_of
from umbra.executor.plan.batch_limits import limits_of
from umbra.executor.plan.host_memory import PER_ENTRY, lock_limit, too_much_here
from umbra.executor.plan.kv_caches import frame_of, state_sizes
from umbra.executor.plan.memory import MemoryPlan, plan_memory
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.plan.sketch import EXPERTS, GUESSING, ROWS, sketch_of, weights_of
from umbra.executor.platform.base import Platform
from umbra.executor.platform.registry import load_platform
from umbra.models.registry import load
from umbra.ops.cpu.shadow import BlockShape
from umbra.ops.parallel.groups import Group


def plan_run(case: Case, ranks: RankEnv, world: Group, platform: Platform) -> PlannedRun:
    """Measures and chooses for a run of `case` on `platform`, before weights are loaded."""
    local, sizes = (ranks.local_rank, ranks.local_world_size), sizes_of(case)
    if PLATFORMS[case.platform].own_memory and (why := too_much_here(host_bytes(sizes), ranks.local_world_size)):
        raise UserError(f"case {case.name}: {why}")
    return PlannedRun(wanted_of(case), sizes, local, world, platform.device, platform.copy_ms)


def host_bytes(sizes: ShadowSizes) -> int:
    """Bytes of experts that the host keeps, registered, for a rank on a device of its own."""
    return sizes.split.experts * sizes.blocks.block_bytes


def wanted_of(case: Case) -> Wanted:
    offload, data = case.offload_config, case.data_config
    return Wanted(
        mode=offload.mode,
        slots=offload.slots,
        arena_mb=offload.arena_mb,
        shadow_threads=offload.shadow_threads,
        max_swaps=offload.max_swaps,
        stream_tokens=offload.stream_tokens,
        interval=offload.interval,
        measure_s=offload.measure_s,
        timeout_s=offload.timeout_s,
        batch=data.batch_size,
        decode_rows=case.decode_rows,
        longest=min(data.batch_size * data.input_max_len, data.chunked_prefill_size or 1 << 62),
        on_host=not PLATFORMS[case.platform].own_memory,
        threads_given=case.threads is not None,
        instruction_set=case.instruction_set,
        verbose=case.verbose,
    )


def sizes_of(case: Case) -> ShadowSizes:
    shadowed = ShadowedLayers(case.offload_config.start_layer)
    sketch = sketch_of(case, shadowed)
    facts, dtype = PLATFORMS[case.platform], sketch.build.dtype
    blocks_of = load(facts.shadow_blocks)
    kinds: dict[Any, BlockShape] = {layer: blocks_of(*layer[1:], dtype) for layer in shadowed.layers}
    largest = largest_of({layer: blocks.block_bytes for layer, blocks in kinds.items()}, shadowed.start_layer)
    (count, inner, hidden, format, kind), blocks = largest, kinds[largest]
    config = sketch.config
    # This rank has `count` of a layer's experts, and so on average the same share of the experts of a token.
    top_k = max(1, round(config.experts_per_token * count / config.expert_count))
    shape = ExpertsShape(len(shadowed.layers), count, top_k)
    frame, batch = frame_of(sketch.model, case, sketch.build), case.data_config.batch_size
    slot_bytes, alignment = load(facts.expert_slot)(inner, hidden, format, kind, dtype)
    experts = shape.layers * count
    states = state_sizes(sketch.model, frame.nbytes // frame.units)
    set_pages = set_pages_of(sketch.model, case, sketch.build, slot_bytes, alignment)
    limits = limits_of(case, config, True, set_pages)
    pages, least = limits.pages, limits.pages_of(limits.max_sequence_length)
    own_pages = (pages - limits.checkpoints * set_pages) // batch
    split = ArenaSplit(
        frames_of(case, frame, expert_frames(frame.nbytes, slot_bytes, experts, states), pages) - 1,
        *extent_of(frame.nbytes, slot_bytes, states.nbytes),
        own_pages,
        batch,
        experts,
        curve_of(case.offload_config.hits, f"case {case.name}: offload_config.hits"),
    )
    weights = weights_of(sketch.model)
    unshadowed = sum(part.nbytes for part in weights if part.name in EXPERTS) * shadowed.others
    unshadowed //= shadowed.others + shape.layers
    rest = sum(part.nbytes for part in weights if part.name not in (*ROWS, *EXPERTS, *GUESSING))
    rest += round(unshadowed * shape.used(batch) / count)
    fixed = sum(part.nbytes for part in weights if part.name not in EXPERTS) + unshadowed
    rest += 2 * batch * states.nbytes * states.layers  # which a step reads and writes
    return ShadowSizes(shape, blocks, slot_bytes, alignment, frame, split, pages, least, rest, fixed, states)


def show_offload_plan(case: Case) -> list[PlanLine]:
    """Prints how the arena would be divided and how long steps would take. It counts memory and measures synthetic
    experts, but loads no weights. -> the parts of the arena's buffer"""
    sizes, platform = sizes_of(case), PLATFORMS[case.platform]
    ranks = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=case.world_size, error_file="")
    if not platform.own_memory:  # measured with the platform's own engine
        load_platform(case.platform)(platform_settings(case), ranks)
    planner, choices = choose(wanted_of(case), sizes, (ranks.local_rank, ranks.local_world_size))
    longest, experts, most_slots = sizes.pages, sizes.split.experts, choices.slots.value
    arena, pinned, parts = arena_of(case, sizes, most_slots)
    print(f"case {case.name}: {case.platform}, offload_config.mode: {case.offload_config.mode}")
    print("\n".join(memory_split(case, arena, pinned, longest, most_slots, experts)))
    if not platform.own_memory:
        total = sizes.fixed_bytes + sum(part.nbytes for part in parts)
        print(f"outside the arena: {sizes.fixed_bytes / 1e6:.1f} MB of other weights, {total / 1e9:.2f} GB together")
        print(f"on the host: {experts * sizes.blocks.block_bytes / 1e9:.2f} GB of shadows")
    else:
        print("\n".join(host_lines(sizes, case.world_size)))
    print("\n".join(planner.table(case.data_config.batch_size) + choices.table()))
    print(f"Hit rates depend on the text; offload_config.hits: {case.offload_config.hits} is expected.")
    return parts


def host_lines(sizes: ShadowSizes, ranks: int) -> list[str]:
    """The lines that `--plan` prints about the host's memory where the device has its own."""
    registered = host_bytes(sizes)
    lines = [
        f"on the host, for each rank: {registered / 1e9:.2f} GB of experts, registered in slices; page tables "
        f"{registered / PER_ENTRY / 1e9:.2f} GB"
    ]
    if why := too_much_here(registered, ranks):
        lines.append(f"  not on this machine: {why}")
    if registered > (limit := lock_limit()):
        lines.append(
            f"  a process may lock {limit / 1e9:.3f} GB here, `ulimit -l`: registering may fail until it is raised"
        )
    return lines


def arena_of(case: Case, sizes: ShadowSizes, most_slots: int) -> tuple[Arena, int, list[PlanLine]]:
    """The arena, the number of its frames that experts keep, and the parts of the buffer that it is in."""
    arena, pinned = make_arena(
        case, sizes.frame, sizes.slot_bytes, most_slots, sizes.pages, sizes.least, sizes.alignment, sizes.states
    )
    parts = [PlanLine("frames", arena.frames * arena.frame_bytes)]
    if sizes.frame.beside:
        parts.append(PlanLine("caches beside it", arena.frames * sizes.frame.beside))
    facts = PLATFORMS[case.platform]
    if facts.spare_slots:
        unit = sizes.frame.nbytes // sizes.frame.units
        parts.append(PlanLine("a slot of zeros", -(-facts.spare_slots * sizes.slot_bytes // unit) * unit))
    if facts.padding_states and sizes.states.layers:
        parts.append(PlanLine("states of padding rows", sizes.states.nbytes))
    return arena, pinned, parts


def plan_with_arena(case: Case) -> MemoryPlan:
    """The plan of a case with shadow experts, as many of them resident as may be where `slots` is left open."""
    sizes, slots = sizes_of(case), case.offload_config.slots
    *_, parts = arena_of(case, sizes, sizes.split.experts if slots is None else slots)
    return plan_memory(case, parts)


def memory_split(case: Case, arena: Arena, pinned: int, longest: int, most_slots: int, experts: int) -> list[str]:
    """The lines that `--plan` prints about the arena. `pinned` is the number of frames of experts that may not be
    evicted, `longest` the number of pages of all sequences at their longest, `experts` the number of experts in all
    layers with shadows."""
    frames, extent_frames = arena.frames - 1, arena.extent_frames  # without the frame of the padding page
    pages = frames - pinned
    lines = [
        f"arena: {arena.frames * arena.frame_bytes / 1e6:.1f} MB, {arena.frames} frames of {arena.frame_bytes} bytes, "
        f"each a page of {case.cache_config.page_size} tokens or part of {arena.extent_slots} slots in {extent_frames} "
        "frames",
        f"experts: {experts} with shadows, {arena.slot_bytes} bytes each; {most_slots} may be resident at once",
        f"KV pages: {longest} for {case.data_config.batch_size} sequence(s) at their longest, {pages} can be had"
        + ("" if pages >= longest else ": not all sequences run at once")
        + (f"; a set of recurrent states takes {arena.set_frames}" if arena.set_frames else ""),
    ]
    for name, held in (
        ("no sequence", 0),
        ("half as long", min(longest // 2, pages)),
        ("the longest", min(longest, pages)),
    ):
        slots = min(most_slots, (arena.frames - 1 - held) // extent_frames * arena.extent_slots)
        lines.append(f"  {name:<14} {held:>6} pages, {slots:>6} slots: {slots / experts:4.0%} of the experts fit")
    return lines
