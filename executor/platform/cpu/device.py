"""The CPU: the default for newcomers, and the platform on which everything is tested.

`exe_mode: graph` captures the decode step once for each number of sequences and replays it natively; on several ranks
the collectives are host nodes between the native ops.
"""

import os
import resource
from typing import Any, ClassVar

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.cpu_offload.device import ShadowDevice
from umbra.cpu_offload.planner.choices import Choices
from umbra.executor.config.env import RankEnv
from umbra.executor.platform.base import ModelStep, Platform
from umbra.executor.platform.cpu.shadow_device import CpuDevice
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.batch import Batch
from umbra.models.config import ModelConfig
from umbra.ops import load_ops
from umbra.ops.cpu.engine import Tape, host, placement, start
from umbra.ops.exchange import GroupExchange
from umbra.ops.interface import Exchange, ExpertMatrices, PhysicalExperts

MOST_THREADS = 16  # most threads for each CPU; more than one never helps, since threads wait without sleeping


class CpuExchange(GroupExchange):
    """`GroupExchange` as one node of a tape."""

    def mixture(
        self, x: Tensor, weights: Tensor, ids: Tensor, experts: ExpertMatrices, physical: PhysicalExperts | None = None
    ) -> Tensor:
        out = torch.empty(x.shape)
        mixture = super().mixture
        host(lambda: out.copy_(mixture(x, weights, ids, experts, physical)))
        return out


class CpuPlatform(Platform):
    name: ClassVar[str] = "cpu"
    collectives: ClassVar[str] = "gloo"
    small_graphs: ClassVar[bool] = True

    def __init__(self, settings: PlatformSettings, ranks: RankEnv):
        torch.set_num_threads(1)  # the native pool has the cores
        cpus = len(os.sched_getaffinity(0))
        for key, threads in (("threads", settings.threads), ("shadow_threads", settings.shadow_threads)):
            if threads and threads > MOST_THREADS * cpus:
                raise UserError(
                    f"case {settings.case}: {key}: {threads} are more than {MOST_THREADS} for each of the {cpus} CPUs "
                    "that this process may use"
                )
        self.device, self.decode_rows = torch.device("cpu"), settings.decode_rows
        self.ops, self.placed = load_ops("cpu"), settings.sizes.expert_slots > 0
        chosen = start(
            settings.threads or 0,
            settings.instruction_set,
            ranks.local_rank,
            ranks.local_world_size,
            settings.shadow_threads or 0,
        )
        print(f"native CPU kernels: {chosen}, {placement()}")

    def compile(self, step: ModelStep, model_config: ModelConfig, calls: int = 1) -> ModelStep:
        return GraphStep(step)

    def exchange(self, config: ModelConfig) -> Exchange | None:
        return CpuExchange(self.ops) if self.placed else None

    def shadow_device(self, top_k: int, choices: Choices) -> ShadowDevice:
        return CpuDevice(self.decode_rows, top_k, choices.stream_tokens.value, choices.costs)

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class DecodeGraph:
    """One captured step. Its inputs and its outputs have fixed addresses; `replay` overwrites both in place."""

    def __init__(self, step: ModelStep, batch: Batch):
        self.inputs = {name: t.clone() for name, t in batch.tensors().items()}
        fixed = batch.having(self.inputs)
        self.tape = Tape()
        with self.tape.capture():
            self.output = step(fixed)

    def replay(self, batch: Batch) -> Any:
        fields = batch.fields()
        for name, tensor in self.inputs.items():
            tensor.copy_(fields[name])
        self.tape.replay()
        return self.output


class GraphStep:
    """A decode step as graphs, one for each number of rows in each data-parallel group, of those wanted of them, and of
    layer sets: that of a head is among them only in steps after which it guesses.

    Capturing also computes, so the first step of a size costs one eager step. What it returns is overwritten by the
    next call of the same size.
    """

    def __init__(self, step: ModelStep):
        self.step = step
        self.graphs: dict[tuple[int, ...], DecodeGraph] = {}

    def __call__(self, batch: Batch) -> Any:
        # The same on every rank, so all capture together.
        size = (len(batch.paged), *(batch.tokens_per_group or ()), *(batch.wanted_per_group or ()))
        if size not in self.graphs:
            self.graphs[size] = DecodeGraph(self.step, batch)
            return self.graphs[size].output
        return self.graphs[size].replay(batch)
