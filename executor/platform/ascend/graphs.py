"""Static graphs of the decode step on Ascend, one for each number of sequences.

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
from collections.abc import Callable
from typing import Any, cast

import torch
import torch_npu
import torchair
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torchair.inference._cache_compiler import CompiledModel

from executor.config.case import AscendSettings
from executor.config.env import RankEnv, cann_home
from executor.platform.ascend.compile_cache import CompileCache, compile_facts
from executor.platform.ascend.fallbacks import report
from executor.platform.ascend.trusted_files import source_digest
from executor.platform.ascend.versions import read_versions
from executor.platform.base import Step
from executor.platform.settings import PlatformSettings
from models.batch import Batch
from models.config import ModelConfig
from models.layers.attention import PagedAttention
from models.layers.states import RecurrentStates
from ops.ascend import (
    lowering,  # noqa: F401 (registers)
    vector_core,
)
from ops.ascend.host_memory import pinned
from ops.ascend.recurrent import for_graphs
from ops.ascend.vector_core import converters  # noqa: F401 (registers)
from ops.interface import Recurrent
from umbra.files import ROOT

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
    """The decode step for one number of sequences: a compiled function and its inputs at fixed addresses."""

    def __init__(self, compiled: Step, batch: Batch, device: torch.device, lengths_on_device: bool = False):
        self.compiled, self.lengths_on_device = compiled, lengths_on_device
        batch = self.prepared(batch)
        self.host = {
            name: pinned(tuple(tensor.shape), tensor.dtype, f"graph of {len(batch.paged[0].kv_lens)} sequences").copy_(
                tensor
            )
            for name, tensor in batch.tensors().items()
        }
        self.inputs = {name: tensor.to(device) for name, tensor in batch.tensors().items()}
        for tensor in self.inputs.values():
            torch._dynamo.mark_static(tensor)
            torch._dynamo.mark_static_address(tensor)

    def prepared(self, batch: Batch) -> Batch:
        return batch.with_lengths(torch.tensor(batch.paged[0].kv_lens)) if self.lengths_on_device else batch

    def __call__(self, batch: Batch) -> Tensor:
        """The host does not wait for the copies from pinned memory. They cannot overwrite inputs in use: the tokens
        of the step before have been read, so that step has ended."""
        batch = self.prepared(batch)
        for name, tensor in batch.tensors().items():
            self.host[name].copy_(tensor)
            self.inputs[name].copy_(self.host[name], non_blocking=True)
        # All data-parallel groups are padded to one size, which the graph takes from the shapes of the tensors.
        return self.compiled(dataclasses.replace(batch.having(self.inputs), tokens_per_group=None))


class AscendGraphs:
    """The decode step as graphs, one for each number of sequences."""

    def __init__(
        self,
        step: Step,
        settings: PlatformSettings,
        ranks: RankEnv,
        device: torch.device,
        model_config: ModelConfig,
        communicator: str,
    ):
        """`communicator` is the name of the one that `Exchange` uses, which graphs hold."""
        if not isinstance(step, types.MethodType):
            raise TypeError("a graph is made from a method of a model")
        self.step, self.settings, self.device = step, settings, device
        layers = cast(nn.Module, step.__self__).modules()
        self.states = [layer for layer in layers if isinstance(layer, RecurrentStates)]
        self.tables: Callable[[Recurrent], Recurrent] | None = None  # those of states
        self.graphs: dict[int, AscendGraph] = {}
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

    def __call__(self, batch: Batch) -> Tensor:
        rows, batch = len(batch.token_ids), self._with_places(batch)
        if rows not in self.graphs:
            return self._first(rows, batch)
        before = self.compiles
        logits = self.graphs[rows](batch)
        if self.compiles != before:
            report(f"the graph of {rows} sequences was compiled again", self.settings.strict)
        return logits

    def _with_places(self, batch: Batch) -> Batch:
        """`batch` with the tables of states that graphs take."""
        if batch.recurrent is None:
            return batch
        if not self.tables:
            of_layers = [(layer.conv, layer.inputs, layer.delta) for layer in self.states]
            self.tables = for_graphs(of_layers, self.settings.group_sequences)
        return dataclasses.replace(batch, recurrent=self.tables(batch.recurrent))

    def _first(self, rows: int, batch: Batch) -> Tensor:
        try:
            return self._compile(rows, batch)
        except BackendCompilerFailed as error:  # such as an op without a converter, which it names
            text = str(error.inner_exception)
            op = re.search(r"target=torch\.ops\.([\w.]+)", text)
            reason = (f"{op[1]}: " if op else "") + text.strip().splitlines()[0]
            report(f"decode runs op by op in place of {self.settings.exe_mode}: {reason}", self.settings.strict)
            self.graphs[rows] = AscendGraph(self.step, batch, self.device)
            return self.graphs[rows](batch)

    def _compile(self, rows: int, batch: Batch) -> Tensor:
        for layer in cast(nn.Module, self.step.__self__).modules():
            if isinstance(layer, PagedAttention):
                layer.keep_queries(rows)
        in_ge = self.settings.exe_mode == "ge_graph"
        step, config = named(self.step, rows), compiler_config(self.settings.exe_mode, self.settings.ascend)
        if self.cache is None:
            backend = torchair.get_npu_backend(compiler_config=config)
            compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
            self.graphs[rows] = AscendGraph(compiled, batch, self.device, in_ge)
            return self.graphs[rows](batch)
        shapes = {name: [list(t.shape), str(t.dtype)] for name, t in batch.tensors().items()}
        with self.cache.open(rows, shapes) as entry:
            compiled = torchair.inference.cache_compile(
                step,
                config=config,
                dynamic=True,
                cache_dir=str(entry.folder),
                ge_cache=in_ge,
            )
            self.graphs[rows] = AscendGraph(compiled, batch, self.device, in_ge)
            logits = self.graphs[rows](batch)
            entry.seal()
        return logits

    def _count(self, *_: object) -> None:
        self.compiles += 1


def named(step: types.MethodType, rows: int) -> types.MethodType:
    """A copy of the method, with a different name of its code. Dynamo and torchair's cache distinguish compiled
    functions by their code; of two sizes with the same code the cache would keep neither."""
    function: Any = step.__func__
    name = f"{function.__name__}_{rows}"
    copy = types.FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, name, function.__defaults__, function.__closure__
    )
    return types.MethodType(copy, step.__self__)
