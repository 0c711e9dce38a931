"""Two platforms on the CPU, one with the Ascend ops and one with the reference ops: same runner, model, checkpoints."""

from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from tests.ascend import npu_on_cpu, umbra_on_cpu  # noqa: F401 (register)
from umbra.cpu_offload.device import ShadowDevice
from umbra.cpu_offload.planner.choices import Choices
from umbra.executor.config.env import RankEnv
from umbra.executor.platform.ascend.exchange import most_rows
from umbra.executor.platform.ascend.shadow_device import AscendDevice
from umbra.executor.platform.base import ModelStep, Platform
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.config import ModelConfig
from umbra.ops import load_ops
from umbra.ops.ascend.cann import ALL_ABILITIES, Abilities
from umbra.ops.ascend.exchange import AscendExchange
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.interface import Exchange


class OnCpu(Platform):
    name: ClassVar[str] = "on_cpu"
    collectives: ClassVar[str] = "gloo"
    quantised_head: ClassVar[bool] = False

    def __init__(self, settings: PlatformSettings, ranks: RankEnv):
        self.device = torch.device("cpu")

    def compile(self, step: ModelStep, model_config: ModelConfig, calls: int = 1) -> ModelStep:
        raise NotImplementedError

    def shadow_device(self, top_k: int, choices: Choices) -> ShadowDevice:
        raise NotImplementedError

    def peak_memory_bytes(self) -> int:
        return 0


class ReferenceOnCpu(OnCpu):
    def __init__(self, settings: PlatformSettings, ranks: RankEnv):
        super().__init__(settings, ranks)
        self.ops = load_ops("reference")


def ascend_on_cpu(routing: str, gemv_tokens: int = 0, can: Abilities = ALL_ABILITIES) -> type[Platform]:
    class AscendOnCpu(OnCpu):
        def __init__(self, settings: PlatformSettings, ranks: RankEnv):
            super().__init__(settings, ranks)
            self.ops: Any = AscendOps(getattr(torch, settings.dtype), self.device, routing, gemv_tokens, can=can)
            self.settings = settings

        def exchange(self, config: ModelConfig) -> Exchange | None:
            """Also of rows narrower than the operators take."""
            sizes, most = self.settings.sizes, most_rows(self.settings)
            if sizes.world == 1 or sizes.attn_tp > 1 or sizes.moe_tp > 1:
                return None
            group: Any = dist.new_group(list(range(sizes.world)))
            exchange = AscendExchange(
                self.ops, group.group_name, dist.get_rank(), sizes.world, sizes.physical(config.expert_count), most + 3
            )
            return cast(Exchange, exchange)

        def shadow_device(self, top_k: int, choices: Choices) -> ShadowDevice:
            most = self.settings.decode_rows + 3 * self.settings.sizes.attn_dp  # padded below
            longest = self.settings.prefill_tokens
            return AscendDevice(self.ops, self.device, top_k, most, longest, choices.costs, timeout_s=10, cann=None)

        def padded_rows(self, rows: int) -> int:
            return rows + 3

    return AscendOnCpu
