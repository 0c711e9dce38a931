"""The rules between the keys of a case; each file of rules raises a UserError that names the keys and the rule."""

import dataclasses

from umbra.base.errors import UserError
from umbra.executor.config.case import Case, ParallelSettings
from umbra.executor.config.offload_rules import check_offload
from umbra.executor.config.platforms import PLATFORMS
from umbra.models.registry import load
from umbra.ops.formats import GROUP_SIZES

LEAST_TEMPERATURE = 1e-6


def check(case: Case, where: str) -> None:
    """Refuse a case whose keys contradict each other; sizes that were left open are filled in already. `where` names
    the file."""
    parallel, data = case.parallel_config, case.data_config
    for name in ("attn_tp_size", "moe_tp_size"):
        size = getattr(parallel, name)
        if case.world_size % size:
            raise UserError(f"{where}: parallel_config.{name}: {size} does not divide world_size: {case.world_size}")
    for name in ("embed_tp_size", "lmhead_tp_size"):
        size = getattr(parallel, name)
        if parallel.attn_tp_size % size:
            raise UserError(
                f"{where}: parallel_config.{name}: {size} does not divide attn_tp_size: {parallel.attn_tp_size} "
                "(ranks that share this table must hold the same tokens)"
            )
    check_slots(case, where)
    if data.batch_size % case.attn_dp_size:
        raise UserError(
            f"{where}: data_config.batch_size: {data.batch_size} is not divisible by attn_dp: {case.attn_dp_size} "
            f"(world_size {case.world_size} / attn_tp_size {parallel.attn_tp_size})"
        )
    if fewest := parallel.sequence_parallel_tokens:
        if case.world_size == 1:
            raise UserError(f"{where}: parallel_config.sequence_parallel_tokens: {fewest} needs a world_size above 1")
        if fewest > case.prefill_tokens:
            raise UserError(
                f"{where}: parallel_config.sequence_parallel_tokens: {fewest} is more than the {case.prefill_tokens} "
                "tokens of the largest prefill step: lower it, or raise chunked_prefill_size or input_max_len"
            )
    check_device(case, where)
    check_offload(case, where)
    wanted = case.quantization
    if wanted.group_size not in GROUP_SIZES:
        raise UserError(f"{where}: quantization.group_size: {wanted.group_size} must be 32, 64 or 128")
    if wanted.zero_points and wanted.method != "q4":
        raise UserError(f"{where}: quantization.zero_points: true needs quantization.method: q4, not {wanted.method}")
    draft = case.draft_config
    if (draft.method == "eagle3") != bool(draft.model_path):
        raise UserError(
            f"{where}: draft_config.model_path: {draft.model_path!r} with draft_config.method: {draft.method}: "
            + ("name the head's folder" if draft.method == "eagle3" else "only eagle3 has a head of its own")
        )
    temperature = case.sampling_config.temperature
    if 0 < temperature < LEAST_TEMPERATURE:
        raise UserError(
            f"{where}: sampling_config.temperature: {temperature} must be 0 or at least {LEAST_TEMPERATURE}: logits "
            "divided by less overflow"
        )
    if case.cache_config.disk_path and not case.serve_config.prefix_cache:
        raise UserError(f"{where}: cache_config.disk_path: needs serve_config.prefix_cache: true")
    if not case.model_path:
        raise UserError(f"{where}: model_path is missing: name the folder of the checkpoint")
    if data.max_model_len == 1:
        raise UserError(f"{where}: data_config.max_model_len: {data.max_model_len} must be at least 2")


def check_device(case: Case, where: str) -> None:
    """Refuse what the case's device cannot do, and keys that only another device reads."""
    facts, page_size = PLATFORMS[case.platform], case.cache_config.page_size
    if case.exe_mode not in facts.exe_modes:
        modes = ", ".join(facts.exe_modes)
        raise UserError(f"{where}: exe_mode: {case.exe_mode!r} is not one of {case.platform}'s: {modes}")
    if page_size % facts.page_multiple:
        raise UserError(
            f"{where}: cache_config.page_size: {page_size} must be a multiple of {facts.page_multiple} on platform: "
            f"{case.platform}: choose {facts.page_size}"
        )
    method, rest = case.quantization.method, case.quantization.rest
    if method not in ("auto", "none", *facts.quantised):
        others = " or ".join([*(kind for kind in ("q8", "q4") if kind in facts.quantised), "none"])
        raise UserError(
            f"{where}: quantization.method: {method} has no fused kernels on platform: {case.platform}: choose {others}"
        )
    if rest not in ("none", *facts.quantised):
        raise UserError(
            f"{where}: quantization.rest: {rest} has no fused kernels on platform: {case.platform}: leave it out"
        )
    if case.model_config.enable_cache_compile and not facts.keeps_graphs:
        raise UserError(
            f"{where}: model_config.enable_cache_compile: true has nothing to keep on platform: {case.platform}"
        )
    for name in (name for other in PLATFORMS.values() if other is not facts for name in other.sections):
        settings = getattr(case, name)
        for field in dataclasses.fields(settings):
            if getattr(settings, field.name) != field.default:
                raise UserError(
                    f"{where}: {name}.{field.name}: has no meaning on platform: {case.platform}: leave it out"
                )
    if facts.rules:
        load(facts.rules)(case, where)


def check_slots(case: Case, where: str) -> None:
    """Refuse a placement of experts by routing that has no ranks to place them on, or no rows to send to them."""
    parallel = case.parallel_config
    key = f"{where}: parallel_config.expert_slots: {parallel.expert_slots}"
    if not parallel.expert_slots:
        if parallel.rebalance_steps != ParallelSettings.rebalance_steps:
            raise UserError(
                f"{where}: parallel_config.rebalance_steps: has no meaning with parallel_config.expert_slots: 0: "
                "leave it out"
            )
        return
    if case.world_size == 1 or parallel.attn_tp_size > 1 or parallel.moe_tp_size > 1:
        raise UserError(
            f"{key} needs several ranks with rows and whole experts of their own: set attn_tp_size: 1 and "
            f"moe_tp_size: 1 (they are {parallel.attn_tp_size} and {parallel.moe_tp_size}, world_size is "
            f"{case.world_size})"
        )
    if case.offload_config.mode != "none":
        raise UserError(
            f"{key} and offload_config.mode: {case.offload_config.mode} exclude each other: shadow experts have a "
            "placement of their own: leave out one of the two"
        )
