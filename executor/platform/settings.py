"""What a platform needs of a case. Imports nothing heavy: the launcher uses it too."""

from dataclasses import dataclass, field
from pathlib import Path

from executor.config.case import AscendSettings, HcclSettings
from executor.parallel.partitions import ParallelSizes


@dataclass(frozen=True)
class PlatformSettings:
    case: str  # its name, for messages and for the folder of compiled graphs
    exe_mode: str
    dtype: str
    strict: bool  # a fallback that would be silent is an error
    sizes: ParallelSizes
    batch_size: int  # sequences that run together, of all data-parallel groups
    comm_timeout_s: int
    threads: int | None  # of the CPU engine; None: as many as it finds worth having
    instruction_set: str  # of the CPU engine
    shadow_threads: int | None  # of the pool for shadow experts; None: no pool, or the planner chooses later
    shadow_timeout_s: int
    graphs: Path | None  # the folder that keeps compiled graphs for the next start; None: none are kept
    ascend: AscendSettings
    hccl: HcclSettings
    # Everything of the case that can change a compiled graph: a kept graph is used only while all of it is the same.
    graph_facts: dict[str, object] = field(repr=False)

    @property
    def group_batch(self) -> int:
        """Most sequences that run together in one data-parallel group."""
        return self.batch_size // self.sizes.attn_dp
