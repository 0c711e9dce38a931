"""The facts that a device's folder states about itself. They are known without the device's libraries, so a case is
read, checked and planned on any machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceFacts:
    """Names of classes and functions are `module:name` and are imported when they are used; empty: the device has
    none."""

    platform: str  # the class over executor/platform/base.py
    layout: str  # the class with the tensor shapes of its ops, which needs no device: for counts of memory
    exe_modes: tuple[str, ...]
    default_mode: str  # the exe_mode of a checkpoint that is run without a case
    page_size: int  # page size of the KV cache if a case leaves it open
    quantised: tuple[str, ...]  # the kinds of quantised matrices that its ops multiply with
    page_multiple: int = 1  # a page has a multiple of this number of tokens
    activations: str = ""  # the type of activations whatever the case says; empty: the case's
    mixes: bool = False  # rows of a matrix, and an expert's matrices, may be in several formats
    keeps_packed: bool = False  # quantised weights are kept in `packed_cache/`
    padding_states: bool = False  # padding rows of graphs have states, at the last place of each layer with states
    # Both take (inner, hidden, format, kind, dtype) of experts. The first returns (bytes, alignment) of one's slot on
    # the device, the second the ops.cpu.shadow.Blocks that the host keeps. Empty: there are no shadow experts.
    expert_slot: str = ""
    shadow_blocks: str = ""
    spare_slots: int = 0  # slots after the arena's own that the device needs for itself
    sections: Mapping[str, type] = field(default_factory=dict)  # the sections of a case that only this device reads
    rules: str = ""  # the function (case, where) that refuses what the device cannot do
    memory_key: str = ""  # the key of a case with the GB of a device; empty: the device computes in the host's memory
    memory_plan: str = ""  # the function (case, arena) -> executor.plan.memory.MemoryPlan
    counting: str = ""  # the function (case, config) -> executor.plan.counting.Counting of its steps
    # Keys of a case with other sizes, of which `umbra plan --cluster` tries many.
    layout_settings: Mapping[str, object] = field(default_factory=dict)
    environment: str = ""  # the function (settings, given) -> the environment variables of a rank
    plugin: str = ""  # the package that brings the device to PyTorch
    runtime: str = ""  # what a machine needs before `plugin` can be installed
    lost_rank: str = ""  # a regular expression: errors of collectives, whose reason may be on another node
    clear_graphs: str = ""  # the function (case's name) -> number of graphs kept for later starts, now removed

    @property
    def own_memory(self) -> bool:
        """Says whether the device has memory of its own, which experts are copied to from the host's."""
        return bool(self.memory_key)

    @property
    def plans_memory(self) -> bool:
        """Says whether the memory of a rank can be counted against that of its device."""
        return bool(self.memory_plan)

    @property
    def keeps_graphs(self) -> bool:
        """Says whether compiled graphs can be kept for the next start."""
        return bool(self.clear_graphs)

    @property
    def quantised_head(self) -> bool:
        """Says whether the output head is quantised to 8 bits if linear layers are quantised."""
        return "q8" in self.quantised
