"""The decode step as CUDA graphs, one for each number of rows, in one pool of memory.

Inputs have fixed addresses, to which each step copies its data: lengths, tables and places are among them, so a replay
needs nothing else of the host. The first step of a size runs op by op, which also compiles and loads its kernels; the
graph is captured after it, and capturing computes nothing.
"""

from typing import Any

import torch
from torch import Tensor

from umbra.executor.platform.base import ModelStep
from umbra.models.batch import Batch

ALIGNMENT = 64


class Inputs:
    """The tensors of a step's batch at fixed addresses on the device. Those from the host are copied as one: of their
    memory there are `calls` pinned buffers, used in turn, because a copy may run while the host prepares the next."""

    def __init__(self, batch: Batch, device: torch.device, calls: int):
        tensors = batch.tensors()
        self.on_host = [name for name, tensor in tensors.items() if tensor.device.type == "cpu"]
        starts, end = {}, 0
        for name in self.on_host:
            starts[name], end = end, end + -(-tensors[name].nbytes // ALIGNMENT) * ALIGNMENT
        pinned = device.type == "cuda"
        self.host = [torch.empty(end, dtype=torch.uint8, pin_memory=pinned) for _ in range(calls)]
        self.copied = torch.empty(end, dtype=torch.uint8, device=device)

        def views(memory: Tensor) -> dict[str, Tensor]:
            parts = {name: memory[start : start + tensors[name].nbytes] for name, start in starts.items()}
            return {name: part.view(tensors[name].dtype).view(tensors[name].shape) for name, part in parts.items()}

        self.host_views, self.turn = [views(memory) for memory in self.host], 0
        others = {name: torch.empty_like(t) for name, t in tensors.items() if name not in starts}
        self.tensors = views(self.copied) | others

    def copy(self, batch: Batch) -> None:
        self.turn = (self.turn + 1) % len(self.host)
        for name, tensor in batch.tensors().items():
            to = self.host_views[self.turn][name] if name in self.on_host else self.tensors[name]
            to.copy_(tensor)
        self.copied.copy_(self.host[self.turn], non_blocking=True)


class CudaGraph:
    """A step of one size. What it returns is overwritten by the next call of the same size."""

    def __init__(self, step: ModelStep, batch: Batch, device: torch.device, calls: int, pool: Any):
        self.inputs, self.step, self.device = Inputs(batch, device, calls), step, device
        # All data-parallel groups are padded to one size, which the step takes from the shapes of the tensors.
        self.batch = batch.having(self.inputs.tensors)
        self.pool, self.output = pool, None
        self.graph: torch.cuda.CUDAGraph | None = None

    def first(self, batch: Batch) -> Any:
        """Runs the step op by op, then captures it."""
        self.inputs.copy(batch)
        if self.device.type != "cuda":
            return self.step(self.batch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            output = self.step(self.batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self.output = self.step(self.batch)
        self.graph = graph
        return output

    def __call__(self, batch: Batch) -> Any:
        self.inputs.copy(batch)
        if self.graph is None:
            return self.step(self.batch)
        self.graph.replay()
        return self.output


class CudaGraphs:
    """A step as graphs, one for each number of rows, and of those wanted of them. `calls` is the most calls of one
    before the host reads what they found."""

    def __init__(self, step: ModelStep, device: torch.device, calls: int):
        self.step, self.device, self.calls = step, device, calls
        self.graphs: dict[tuple[int, ...], CudaGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Any:
        size = (len(batch.token_ids), len(batch.paged), *(batch.wanted_per_group or ()))
        if size in self.graphs:
            return self.graphs[size](batch)
        self.graphs[size] = CudaGraph(self.step, batch, self.device, self.calls, self.pool)
        return self.graphs[size].first(batch)
