"""The settings of a case that a platform needs. Imports nothing heavy, since the launcher uses it too."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from umbra.base.files import CACHES
from umbra.ops.parallel.partitions import ParallelSizes

T = TypeVar("T")
GRAPHS = CACHES / "compile_cache"  # compiled graphs of all cases


@dataclass(frozen=True)
class PlatformSettings:
    case: str  # name of the case, for messages and for the folder of compiled graphs
    exe_mode: str
    dtype: str
    strict: bool  # a fallback that would be silent is an error
    sizes: ParallelSizes
    group_sequences: int  # most sequences of a data-parallel group
    decode_rows: int  # most rows of a decode step, in all data-parallel groups
    prefill_tokens: int  # most prompt tokens of a data-parallel group in one step
    comm_timeout_s: int
    threads: int | None  # threads of the CPU engine; None: the engine measures how many are useful
    instruction_set: str  # instruction set of the CPU engine
    shadow_threads: int | None  # threads of the pool for shadow experts; None: no pool, or the planner chooses later
    shadow_timeout_s: int
    graphs: Path | None  # the folder that keeps compiled graphs for the next start; None: none are kept
    sections: tuple[object, ...]  # the sections of the case that only this device reads
    # All settings of the case that can change a compiled graph. A kept graph is used only while none of them changes.
    graph_facts: dict[str, object] = field(repr=False)

    def of_device(self, kind: type[T]) -> T:
        """The device's section of this type."""
        return next(section for section in self.sections if isinstance(section, kind))

    @property
    def group_rows(self) -> int:
        """Most rows of a decode step in one data-parallel group."""
        return self.decode_rows // self.sizes.attn_dp
