"""Sets up the shadow experts of a case."""

from umbra.cpu_offload.manager import ShadowExperts, ShadowSettings
from umbra.cpu_offload.planner.choices import Choices
from umbra.executor.config.case import Case
from umbra.executor.platform.base import Platform
from umbra.models.config import ModelConfig
from umbra.ops.cpu.engine import shadow_teams
from umbra.ops.cpu.shadow import ShadowPool


def make_shadow_experts(case: Case, choices: Choices, platform: Platform, config: ModelConfig) -> ShadowExperts:
    """Makes the shadow experts of `case`; `config` is the model's config."""
    wanted = case.offload_config
    settings = ShadowSettings(
        mode=wanted.mode,
        start_layer=wanted.start_layer,
        slots=choices.slots.value,
        interval=wanted.interval,
        max_swaps=choices.max_swaps.value,
    )
    pool = ShadowPool(shadow_teams(choices.threads.value[1]), wanted.timeout_s)
    return ShadowExperts(settings, platform.shadow_device(config.experts_per_token, choices), pool)
