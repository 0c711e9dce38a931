"""Static graphs on Ascend of the decode step, one for each number of sequences, and of the step that guesses tokens.

ge_graph     torch.compile into a GE graph (torchair's `max-autotune`)
acl_graph    captured on the device and replayed (torchair's `reduce-overhead`)
npugraph_ex  the same with torchair's newer backend

Every tensor input has a fixed address, to which each step copies its data. KV lengths are one of them in GE, whose
attention reads them on the device; in captured graphs they are host integers, with which launches are updated. So a
step changes neither shapes nor constants, compiles nothing again and reads nothing back.
"""

import dataclasses
import re
import types
from typing import Any, cast

import torch
import torch_npu
import torchair
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torchair.inference._cache_compiler import CompiledModel

from umbra.base.files import ROOT
from umbra.executor.config.env import RankEnv
from umbra.executor.platform.ascend.compile_cache import CompileCache, compile_facts
from umbra.executor.platform.ascend.environment import cann_home
from umbra.executor.platform.ascend.fallbacks import report
from umbra.executor.platform.ascend.settings import AscendSettings
from umbra.executor.platform.ascend.trusted_files import source_digest
from umbra.executor.platform.ascend.versions import read_versions
from umbra.executor.platform.base import ModelStep
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.batch import Batch
from umbra.models.config import ModelConfig
from umbra.models.layers.attention import PagedAttention
from umbra.models.layers.states import RecurrentStates
from umbra.ops.ascend import (
    lowering,  # noqa: F401 (registers)
    vector_core,
)
from umbra.ops.ascend.host_memory import pinned
from umbra.ops.ascend.recurrent import GraphStrips
from umbra.ops.ascend.vector_core import converters  # noqa: F401 (registers)

MODES = {"ge_graph": "max-autotune", "acl_graph": "reduce-overhead", "npugraph_ex": "npugraph_ex"}
# Folders of the code that graphs are made from.
TRACED = ("models", "ops", "cpu_offload", "executor/platform")


def compiler_config(exe_mode: str, ascend: AscendSettings) -> Any:
    """torchair's CompilerConfig for one of MODES."""
    config = torchair.CompilerConfig()
    config.mode = MODES[exe_mode]
    config.experimental_config.frozen_parameter = True  # weights and caches stay where they are
    if exe_mode == "ge_graph":
        config.experimental_config.tiling_schedule_optimize = True
        config.experimental_config.topology_sorting_strategy = "StableRDFS"
    if exe_mode == "npugraph_ex":
        config.experimental_config.aclgraph._super_kernel_optimize = ascend.super_kernel
        config.experimental_config.aclgraph._aclnn_static_shape_kernel = ascend.static_kernels
    return config


class AscendGraph:
    """A step of one size: a compiled function and its inputs at fixed addresses. Of the inputs on the host there are
    `calls` pinned copies, which calls use in turn."""

    def __init__(
        self, compiled: ModelStep, batch: Batch, device: torch.device, calls: int, lengths_on_device: bool = False
    ):
        self.compiled, self.lengths_on_device, self.turn = compiled, lengths_on_device, 0
        tensors, what = self.prepared(batch).tensors(), f"graph of {len(batch.token_ids)} tokens"
        on_host = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        self.host = [
            {name: pinned(tuple(tensor.shape), tensor.dtype, what) for name, tensor in on_host.items()}
            for _ in range(calls)
        ]
        self.inputs = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
        for tensor in self.inputs.values():
            torch._dynamo.mark_static(tensor)
            torch._dynamo.mark_static_address(tensor)

    def prepared(self, batch: Batch) -> Batch:
        return batch.with_lengths(torch.tensor(batch.paged[0].kv_lens)) if self.lengths_on_device else batch

    def __call__(self, batch: Batch) -> Any:
        """The host does not wait for the copies from pinned memory, nor overwrites one in use: the tokens of the step
        before have been read, so that step has ended."""
        batch = self.prepared(batch)
        self.turn = (self.turn + 1) % len(self.host)
        for name, tensor in batch.tensors().items():
            if name in self.host[self.turn]:
                tensor = self.host[self.turn][name].copy_(tensor)
            self.inputs[name].copy_(tensor, non_blocking=True)
        # All data-parallel groups are padded to one size, which the graph takes from the shapes of the tensors.
        even: Any = dict(tokens_per_group=None, wanted_per_group=batch.wanted_per_group and ())
        return self.compiled(dataclasses.replace(batch.having(self.inputs), **even))


class AscendGraphs:
    """A step as graphs, one for each number of rows, and of those wanted of them. `calls` is the most calls of one
    before the host reads what they found."""

    def __init__(
        self,
        step: ModelStep,
        settings: PlatformSettings,
        ranks: RankEnv,
        device: torch.device,
        model_config: ModelConfig,
        communicator: str,
        calls: int,
    ):
        """`communicator` is the name of the one that `Exchange` uses, which graphs hold."""
        if not isinstance(step, types.MethodType):
            raise TypeError("a graph is made from a method of a model")
        self.step, self.settings, self.device, self.calls = step, settings, device, calls
        layers = cast(nn.Module, step.__self__).modules()
        self.states = [layer for layer in layers if isinstance(layer, RecurrentStates)]
        self.strips: GraphStrips | None = None
        self.graphs: dict[tuple[int, ...], AscendGraph] = {}
        self.compiles = 0
        self.cache: CompileCache | None = None
        if hasattr(functorch_config, "error_on_custom_op_aliasing"):
            # torchair captures the in-place rotary op, which newer versions of torch forbid where `CI` is set.
            functorch_config.error_on_custom_op_aliasing = False
        callback_handler.register_start_callback(self._count)
        if settings.graphs:
            traced = source_digest(ROOT, [ROOT / folder for folder in TRACED])
            torchair_is = f"{torch_npu.version.git_version}, cache {CompiledModel.VERSION}"  # has no version of its own
            facts = compile_facts(
                settings.graph_facts,
                model_config,
                read_versions(cann_home()),
                torchair_is,
                traced,
                vector_core.built(),
                communicator,
            )
            self.cache = CompileCache(settings.case, ranks.rank, ranks.world_size, facts, settings.graphs)

    def __call__(self, batch: Batch) -> Any:
        size, batch = _size_of(batch), self._with_places(batch)
        if size not in self.graphs:
            return self._first(size, batch)
        before = self.compiles
        output = self.graphs[size](batch)
        if self.compiles != before:
            report(f"the graph of {size[0]} sequences was compiled again", self.settings.strict)
        return output

    def _with_places(self, batch: Batch) -> Batch:
        """`batch` with the tables of states that graphs take."""
        if batch.recurrent is None:
            return batch
        if not self.strips:
            of_layers = [(layer.conv, layer.inputs, layer.delta) for layer in self.states]
            self.strips = GraphStrips(of_layers, self.settings.group_sequences)
        return dataclasses.replace(batch, recurrent=self.strips.tables(batch.recurrent))

    def _first(self, size: tuple[int, ...], batch: Batch) -> Any:
        try:
            return self._compile(size, batch)
        except BackendCompilerFailed as error:  # such as an op without a converter, which it names
            text = str(error.inner_exception)
            op = re.search(r"target=torch\.ops\.([\w.]+)", text)
            reason = (f"{op[1]}: " if op else "") + text.strip().splitlines()[0]
            report(f"decode runs op by op in place of {self.settings.exe_mode}: {reason}", self.settings.strict)
            self.graphs[size] = AscendGraph(self.step, batch, self.device, self.calls)
            return self.graphs[size](batch)

    def _compile(self, size: tuple[int, ...], batch: Batch) -> Any:
        for layer in cast(nn.Module, self.step.__self__).modules():
            if isinstance(layer, PagedAttention):
                layer.keep_queries(size[0])
        in_ge = self.settings.exe_mode == "ge_graph"
        step, config = (
            named(self.step, size),
            compiler_config(self.settings.exe_mode, self.settings.of_device(AscendSettings)),
        )
        if self.cache is None:
            backend = torchair.get_npu_backend(compiler_config=config)
            compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
            self.graphs[size] = AscendGraph(compiled, batch, self.device, self.calls, in_ge)
            return self.graphs[size](batch)
        shapes = {name: [list(t.shape), str(t.dtype)] for name, t in batch.tensors().items()}
        with self.cache.open(step.__name__, shapes) as entry:
            compiled = torchair.inference.cache_compile(
                step, config=config, dynamic=True, cache_dir=str(entry.folder), ge_cache=in_ge
            )
            self.graphs[size] = AscendGraph(compiled, batch, self.device, self.calls, in_ge)
            output = self.graphs[size](batch)
            entry.seal()
        return output

    def _count(self, *_: object) -> None:
        self.compiles += 1


def _size_of(batch: Batch) -> tuple[int, ...]:
    """The number of rows and, where only some go on after the last attention, of these."""
    rows = len(batch.token_ids)
    return (rows,) if batch.wanted_per_group is None or batch.logit_rows is None else (rows, len(batch.logit_rows))


def named(step: types.MethodType, size: tuple[int, ...]) -> types.MethodType:
    """A copy of the method, with a different name of its code. Dynamo and torchair's cache distinguish compiled
    functions by their code; of two sizes with the same code the cache would keep neither."""
    function: Any = step.__func__
    name = "_".join((function.__name__, *map(str, size)))
    copy = types.FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, name, function.__defaults__, function.__closure__
    )
    return types.MethodType(copy, step.__self__)
