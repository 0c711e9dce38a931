"""The memory that one rank needs on a device with memory of its own, counted by the device's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.units import GB
from umbra.executor.plan.activations import PlanLine
from umbra.executor.plan.batch_limits import Limits
from umbra.models.registry import load

# The sections that any device has; ARENA is the buffer that experts with shadows share with the KV cache.
WEIGHTS, CACHE, ARENA, PREFILL, GRAPHS, REST = (
    "weights",
    "KV cache",
    "arena",
    "prefill step",
    "decode graphs",
    "allowance",
)
REMEDIES = {
    WEIGHTS: "raise world_size, or set quantization.method: q4",
    CACHE: "lower batch_size, input_max_len or max_new_tokens",
    ARENA: "lower offload_config.arena_mb",
    PREFILL: "lower chunked_prefill_size (0: no limit)",
    GRAPHS: "lower batch_size",
    REST: "use dies with more memory",
}


def device_gb(case: Case) -> int:
    """The GB of memory of one of the case's devices, which has its own, as the case says."""
    size: int = attrgetter(PLATFORMS[case.platform].memory_key)(case)
    return size


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that one rank needs, by sections."""

    case: Case
    sections: Mapping[str, list[PlanLine]]
    remedies: Mapping[str, str]  # what takes less memory, by section
    page_nbytes: int  # bytes of one KV page of a set of layers
    limits: Limits
    decode: list[PlanLine]  # the parts that a decode step reads from memory

    @property
    def total(self) -> int:
        return sum(self.of(name) for name in self.sections)

    @property
    def left(self) -> int:
        return device_gb(self.case) * GB - self.total

    @property
    def tokens_left(self) -> int:
        """Number of further tokens of KV cache, in whole pages, that fit into the memory that is left."""
        pages = max(self.left, 0) // self.page_nbytes
        return pages // max(1, self.limits.windows.count(None)) * self.limits.page_size

    def of(self, section: str) -> int:
        """Bytes of all parts of a section."""
        return sum(part.nbytes for part in self.sections[section])


def plan_memory(case: Case, arena: Sequence[PlanLine] = ()) -> MemoryPlan:
    """The plan of a case whose device plans memory. `arena` has the parts of the buffer that experts with shadows share
    with the KV cache; empty: there are no shadows."""
    plan: MemoryPlan = load(PLATFORMS[case.platform].memory_plan)(case, arena)
    return plan
