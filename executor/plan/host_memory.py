"""Refuses a case whose ranks do not fit into RAM or the cgroup, before any of it is allocated: Linux would kill a
process instead of refusing."""

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from umbra.base.errors import UserError
from umbra.executor.config.case import Case
from umbra.executor.config.units import GB, MB

if TYPE_CHECKING:
    from umbra.executor.plan.sketch import Sketch

STATUS, CAP_IPC_LOCK = Path("/proc/self/status"), 14
PER_ENTRY = 4096 // 8  # bytes of memory for each byte of page tables
CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def check_host_memory(case: Case, local_ranks: int, sketch: "Sketch") -> None:
    """Checks a case whose platform's device is the CPU. `local_ranks` is the number of the job's ranks on this
    machine, each of which counts as much as this process has by now: the program and its libraries."""
    weights, cache = _bytes_of(sketch, case)
    total, (room, of) = local_ranks * (weights + cache + _program_bytes()), memory_limit()
    if total > room:
        rank_room = room // local_ranks - _program_bytes()  # for weights and cache
        remedies = [*_less_cache(case, sketch, rank_room - weights, cache), *_smaller(case, sketch, rank_room)]
        remedy = "; or ".join(remedies) or "this model needs a larger machine, or more of them (world_size)"
        raise UserError(
            f"case {case.name}: {weights / GB:.2f} GB of weights, {cache / GB:.2f} GB of KV cache and "
            f"{_program_bytes() / GB:.2f} GB of program on each of {local_ranks} rank(s) do not fit into the "
            f"{room / GB:.2f} GB of {of}: {remedy}"
        )


def _bytes_of(sketch: "Sketch", case: Case) -> tuple[int, int]:
    """Returns the bytes of a rank's weights, and of its KV cache or of the arena in its place."""
    from umbra.executor.plan.sketch import cache_of, weights_of  # which imports torch

    arena = case.offload_config.arena_mb if case.offload_config.mode != "none" else None
    cache = int(arena * MB) if arena else cache_of(sketch).nbytes
    return sum(part.nbytes for part in weights_of(sketch.model)), cache


def _less_cache(case: Case, sketch: "Sketch", left: int, cache: int) -> Iterator[str]:
    """The settings with which the cache has at most `left` bytes."""
    if left <= 0:
        return
    if case.offload_config.mode != "none" and case.offload_config.arena_mb:
        yield f"lower offload_config.arena_mb to {int(left / MB)}"
        return
    limits = sketch.limits
    pages = int(left / cache * (sketch.pages + 1)) - 1 - limits.checkpoints * limits.set_pages
    for sequences in dict.fromkeys((limits.per_group, 1)):
        if (longest := limits.longest_in(pages // sequences)) > 1:
            yield f"set max_model_len: {longest} with batch_size: {sequences * limits.groups}"


def _smaller(case: Case, sketch: "Sketch", room: int) -> Iterator[str]:
    """The settings of formats with each of which weights and cache have at most `room` bytes. What is stored in four
    bits is not quantised again."""
    from umbra.executor.plan.sketch import sketch_of

    formats, quantization = sketch.build.formats, case.quantization
    ways = [("cache_config.kv_dtype", "int8")]
    if formats.own:
        ways += [("quantization.rest", "q8")]
        ways += [("quantization.method", "q4")] if formats.linear.spec.bits == 8 else []
    elif quantization.method != "q4":
        ways += [("quantization.method", method) for method in ("q8", "q4")]
    for name, value in ways:
        section, key = name.split(".")
        changed = replace(case, **{section: replace(getattr(case, section), **{key: value})})
        with contextlib.suppress(UserError):  # the rules refuse it
            if sum(_bytes_of(sketch_of(changed, config=sketch.config), changed)) <= room:
                yield f"set {name}: {value}"


def memory_limit(cgroups: Path = CGROUPS, own: Path = OWN) -> tuple[int, str]:
    """The bytes of memory that processes like this one may have together, and what has the limit: the machine, or the
    file of a cgroup. `own` is the file that names this process's cgroups, which lie below `cgroups`."""
    limits = [(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine's memory")]
    for file in _limit_files(cgroups, own):
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            limits.append((int(file.read_text()), str(file)))
    return min(limits)


def lock_limit() -> float:
    """The bytes of memory that this process may lock, as memory is that a device copies from and to by itself."""
    own = int(next(line for line in STATUS.read_text().splitlines() if line.startswith("CapEff:")).split()[1], 16)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return math.inf if own >> CAP_IPC_LOCK & 1 or soft == resource.RLIM_INFINITY else soft


def too_much_here(registered: int, local_ranks: int) -> str | None:
    """Why this machine's memory is not enough for `local_ranks` ranks, for each of which the host keeps so many bytes
    of experts as memory that its device copies from by itself. None: it is enough."""
    room, of = memory_limit()
    if (total := local_ranks * (registered + registered // PER_ENTRY)) <= room:
        return None
    return (
        f"{total / 1e9:.1f} GB of experts on the host do not fit into the {room / 1e9:.1f} GB of {of}: raise "
        "offload_config.start_layer, use fewer bits, or a larger machine"
    )


def free_memory() -> int:
    """The bytes that are free on this machine, or the limit of a cgroup if that is less."""
    text = Path("/proc/meminfo").read_text()
    free = int(next(line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:"))) * 1024
    return min(free, memory_limit()[0])


def _limit_files(cgroups: Path, own: Path) -> Iterator[Path]:
    """Yields the files that may limit this process: in its cgroup and in all above it. In a container its name may be
    that outside, of which only the end of the way up is to be seen."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top, file = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
            folder = top / name.strip("/")
            yield from (above / file for above in (folder, *folder.parents) if above.is_relative_to(top))


def _program_bytes() -> int:
    """Returns the bytes that this process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
