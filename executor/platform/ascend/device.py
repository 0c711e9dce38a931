"""Huawei Ascend: one NPU die a rank, collectives over HCCL, decode in static graphs (graphs.py)."""

import sys
import time
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
import torch_npu
from torch import nn
from torch_npu.npu.utils import get_cann_version

from umbra.base.errors import REFUSALS, UserError
from umbra.cpu_offload.device import ShadowDevice
from umbra.cpu_offload.planner.choices import Choices
from umbra.executor.config.env import RankEnv
from umbra.executor.platform.ascend.environment import cann_home
from umbra.executor.platform.ascend.errors import refusal
from umbra.executor.platform.ascend.exchange import check_slots, most_rows, why_gathered, why_refused, window_mb
from umbra.executor.platform.ascend.fallbacks import loud_fallbacks
from umbra.executor.platform.ascend.graphs import AscendGraphs
from umbra.executor.platform.ascend.hccl import AI_CPU, group_options
from umbra.executor.platform.ascend.kernels import (
    cache_line,
    check_offsets,
    chosen_kernels,
    gemv_tokens,
    prefetch_attention,
)
from umbra.executor.platform.ascend.settings import AscendSettings, HcclSettings
from umbra.executor.platform.ascend.versions import check_versions, read_versions
from umbra.executor.platform.base import ModelStep, Platform, graph_rows
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.causal_lm import CausalLM
from umbra.models.config import ModelConfig
from umbra.ops.ascend import vector_core
from umbra.ops.ascend.exchange import AscendExchange
from umbra.ops.ascend.host_memory import pinned
from umbra.ops.ascend.ops import AscendOps, installed
from umbra.ops.interface import Exchange, Ops

EXCHANGE = "npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2"
COPIES = 5  # number of copies that are timed; the fastest is taken


class AscendPlatform(Platform):
    name: ClassVar[str] = "ascend"
    collectives: ClassVar[str] = "hccl"

    def __init__(self, settings: PlatformSettings, ranks: RankEnv):
        self.settings, self.ranks = settings, ranks
        REFUSALS[self.name] = refusal
        versions = read_versions(cann_home(), get_cann_version() or None)
        self.cann = versions.cann
        for warning in check_versions(versions, settings.strict):
            print(f"warning: {warning}")
        devices = torch_npu.npu.device_count()
        if ranks.local_rank >= devices:
            raise UserError(
                f"case {settings.case}: rank {ranks.rank} needs NPU {ranks.local_rank}, this machine has {devices}"
            )
        self.device = torch.device("npu", ranks.local_rank)
        torch_npu.npu.set_device(self.device)
        torch_npu.npu.config.allow_internal_format = True  # FRACTAL_NZ weights
        dtype: torch.dtype = getattr(torch, settings.dtype)
        tokens = gemv_tokens(settings, bool(vector_core.built()))
        if tokens:
            vector_core.load()
        ascend = settings.of_device(AscendSettings)
        self.can = installed(self.cann)
        self.own = AscendOps(
            dtype,
            self.device,
            ascend.moe_routing,
            tokens,
            ascend.gemv_float_sums,
            self.can,
            ascend.super_kernel and settings.exe_mode == "ge_graph",
        )
        self.ops = cast(Ops, self.own)
        self.communicator = self.rows = ""  # the name of that of `exchange`, and what is printed about it

    def compile(self, step: ModelStep, model_config: ModelConfig, calls: int = 1) -> ModelStep:
        if self.settings.of_device(AscendSettings).prefetch and self.ranks.world_size > 1:
            prefetch_attention(cast(CausalLM, cast(MethodType, step).__self__))
        return AscendGraphs(step, self.settings, self.ranks, self.device, model_config, self.communicator, calls)

    def exchange(self, config: ModelConfig) -> Exchange | None:
        settings, most = self.settings, most_rows(self.settings)
        soc = torch_npu.npu.get_device_name(self.device)
        why = why_gathered(settings, config) or why_refused(soc, self.cann)
        check_slots(settings, why)
        few = f"{EXCHANGE}, at most {most} rows a rank"
        self.rows = (f"gathered ({why})" if why else few) if settings.sizes.attn_dp > 1 and config.expert_count else ""
        if why:
            return None
        window = window_mb(most, config, settings.sizes)
        options = self._options({"hccl_buffer_size": window, "hccl_op_expansion_mode": AI_CPU})
        rank, size = self.ranks.rank, self.ranks.world_size
        group = dist.new_group(list(range(size)), pg_options=options)  # the operators share it with nothing else
        self.communicator = group._get_backend(self.device).get_hccl_comm_name(rank)
        experts = settings.sizes.physical(config.expert_count)
        return cast(Exchange, AscendExchange(self.own, self.communicator, rank, size, experts, most))

    def kernels(self, model: nn.Module) -> dict[str, str]:
        check_offsets(model, self.settings, self.cann)
        built = bool(vector_core.built())
        return (
            chosen_kernels(model, self.settings, built)
            | cache_line(self.can)
            | ({"rows of experts on other ranks": self.rows} if self.rows else {})
        )

    def group_options(self, group: str) -> Any:
        soc = torch_npu.npu.get_device_name(self.device)
        return self._options(group_options(self.settings.of_device(HcclSettings), self.settings.sizes, group, soc))

    def _options(self, config: dict[str, int]) -> Any:
        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = config
        return options

    def padded_rows(self, rows: int) -> int:
        return 0 if self.settings.exe_mode == "eager" else graph_rows(rows, self.settings.group_rows)

    def watched(self) -> AbstractContextManager[None]:
        return loud_fallbacks(self.settings.strict)

    def copy_ms(self, nbytes: int) -> float:
        source, times = pinned((nbytes,), torch.uint8, "shadow experts"), []
        to = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        for _ in range(COPIES):
            torch_npu.npu.synchronize()
            start = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch_npu.npu.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        return min(times)

    def shadow_device(self, top_k: int, choices: Choices) -> ShadowDevice:
        from umbra.executor.platform.ascend.shadow_device import AscendDevice

        settings = self.settings
        stream_tokens = choices.stream_tokens.value
        most = settings.decode_rows if stream_tokens > 0 else sys.maxsize
        most = max(most, stream_tokens - 1)
        return AscendDevice(
            self.own,
            self.device,
            top_k,
            most,
            settings.prefill_tokens,
            choices.costs,
            settings.shadow_timeout_s,
            self.cann,
        )

    def peak_memory_bytes(self) -> int:
        return torch_npu.npu.max_memory_allocated(self.device)
