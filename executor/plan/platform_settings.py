"""Makes a platform's settings from a case. Imports nothing heavy, since the launcher uses it too."""

import dataclasses

from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.platform.settings import GRAPHS, PlatformSettings


def platform_settings(case: Case) -> PlatformSettings:
    """The settings of `case` for its platform."""
    offload = case.offload_config
    return PlatformSettings(
        case=case.name,
        exe_mode=case.exe_mode,
        dtype=case.model_config.dtype,
        strict=case.strict,
        sizes=case.parallel_sizes,
        group_sequences=case.data_config.batch_size // case.attn_dp_size,
        decode_rows=case.decode_rows,
        prefill_tokens=case.prefill_tokens,
        comm_timeout_s=case.parallel_config.comm_timeout_s,
        threads=case.threads,
        instruction_set=case.instruction_set,
        shadow_threads=offload.shadow_threads if offload.mode != "none" else None,
        shadow_timeout_s=offload.timeout_s,
        graphs=GRAPHS if case.model_config.enable_cache_compile else None,
        sections=tuple(getattr(case, name) for name in PLATFORMS[case.platform].sections),
        graph_facts=_graph_facts(case),
    )


def _graph_facts(case: Case) -> dict[str, object]:
    """All settings except the description and the prompts, which change often and do not affect graphs."""
    settings = dataclasses.asdict(case)
    del settings["description"], settings["data_config"]["prompts"]
    return settings
