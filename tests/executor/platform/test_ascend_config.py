"""Cases on ascend, without an NPU or torch: rules, HCCL groups, and the environment with which ranks are started."""

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.config.case import Case
from executor.config.load import load_case
from executor.launch.platform_settings import platform_settings
from executor.platform import start_environment
from executor.platform.ascend.hccl import AI_CPU, AIV, HOST, group_options
from ops.parallel.partitions import GROUPS, partitions
from umbra.errors import UserError
from umbra.files import ROOT

A2, A3 = "Ascend910B3", "Ascend910_9391"
ON_ASCEND = ("platform=ascend", "exe_mode=ge_graph", "method=none", "batch_size=16")


def ascend(*overrides: str) -> Case:
    return load_case("demo", [*ON_ASCEND, *overrides])


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["exe_mode=graph"], "exe_mode: 'graph' is not one of ascend's: eager, ge_graph, acl_graph, npugraph_ex"),
        (["page_size=16"], "cache_config.page_size: 16 must be 128 on platform: ascend"),
        (["dtype=float32"], "model_config.dtype: float32 has no fused kernels on platform: ascend: choose bfloat16 or"),
        (["kv_dtype=int8"], "cache_config.kv_dtype: int8 is not supported on platform: ascend: leave it auto"),
        (["method=q8"], "quantization.method: q8 has no fused kernels on platform: ascend: choose q4 or none"),
        (["exe_mode=eager", "enable_cache_compile=true"], "enable_cache_compile: true has nothing to keep with exe"),
        (["deterministic=true"], "deterministic: true and hccl_config.aiv_group: attn_tp exclude each other"),
        (["aiv_group=moe_tp"], "hccl_config.aiv_group: 'moe_tp' is not one of none, world, attn_tp"),
        (["buffer_mb=0"], "hccl_config.buffer_mb: 0 must be at least 1"),
        (["base_port=80"], "ascend_config.base_port: 80 is the system's: choose 1024 or more, or 0"),
        (["moe_routing=fusion"], "'fusion' is not one of fusion_v2, fusion_v1, tp"),
        (["decode_gemv=maybe"], "ascend_config.decode_gemv: 'maybe' is not one of auto, on, off"),
        (["gemv_max_tokens=9"], "ascend_config.gemv_max_tokens: 9 must be at most 8"),
        (["world_size=8", "world_buffer_mb=100", "attn_tp_buffer_mb=400"],
         "hccl_config.world_buffer_mb: 100 and hccl_config.attn_tp_buffer_mb: 400: both are the group of the same 8"),
        (["world_size=8", "attn_tp_size=4", "attn_tp_buffer_mb=100", "lmhead_tp_buffer_mb=50"],
         "hccl_config.attn_tp_buffer_mb: 100 and hccl_config.lmhead_tp_buffer_mb: 50"),
    ],
)  # fmt: skip
def test_what_ascend_cannot_do_is_named(overrides: list[str], complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        ascend(*overrides)
    assert str(raised.value).startswith("demo.yaml: ")
    assert complaint in str(raised.value)


@pytest.mark.parametrize("override", ["hccl_config.aiv_group=none", "memory_gb=32", "decode_gemv=on"])
def test_keys_of_ascend_are_refused_elsewhere(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=rf"{key}: has no meaning on platform: cpu: leave it out"):
        load_case("demo", [override])


def environment(case: Case, given: Mapping[str, str]) -> dict[str, str]:
    return start_environment(case.platform, platform_settings(case), given)


def options(case: Case, soc: str) -> dict[str, tuple[int, int]]:
    """(MB, mode) of each group."""
    made = {name: group_options(case.hccl_config, case.parallel_sizes, name, soc) for name in GROUPS}
    return {name: (o["hccl_buffer_size"], o["hccl_op_expansion_mode"]) for name, o in made.items()}


def test_only_the_chosen_group_runs_on_the_vector_cores() -> None:
    case = ascend("world_size=8", "attn_tp_size=4", "embed_tp_size=2", "attn_dp_buffer_mb=50", "buffer_mb=300")
    assert options(case, A3) == {
        "world": (300, AI_CPU),
        "attn_tp": (300, AIV),
        "attn_dp": (50, AI_CPU),
        "embed_tp": (300, AI_CPU),
        "lmhead_tp": (300, AIV),  # the same ranks as attn_tp
    }
    assert {mode for _, mode in options(case, A2).values()} == {AIV, HOST}


@settings(deadline=None)
@given(st.data())
def test_no_rank_is_ever_in_two_aiv_groups(data: st.DataObject) -> None:
    world, divisors = 16, [1, 2, 4, 8, 16]
    attn = data.draw(st.sampled_from(divisors))
    below = st.sampled_from([d for d in divisors if d <= attn])
    overrides = [f"world_size={world}", f"attn_tp_size={attn}", f"embed_tp_size={data.draw(below)}"]
    overrides += [f"lmhead_tp_size={data.draw(below)}", f"aiv_group={data.draw(st.sampled_from(['none', *GROUPS]))}"]
    case = ascend(*overrides)
    groups, seen = partitions(case.parallel_sizes), 0
    for rank in range(world):
        own = {name: next(ids for ids in groups[name] if rank in ids) for name in GROUPS}
        made = {name: group_options(case.hccl_config, case.parallel_sizes, name, A3) for name in GROUPS}
        fast = {ids for name, ids in own.items() if made[name]["hccl_op_expansion_mode"] == AIV}
        seen = max(seen, len(fast))
        for one, other in itertools.combinations(GROUPS, 2):  # one group, so its names must give the same options
            if own[one] == own[other] and len(own[one]) > 1:
                assert made[one] == made[other]
    chosen = case.hccl_config.aiv_group
    assert seen == (chosen != "none" and len(groups[chosen][0]) > 1)


def test_the_environment_of_a_plain_case() -> None:
    assert environment(ascend("world_size=8"), {"PATH": "x"}) == {
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "TASK_QUEUE_ENABLE": "2",
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "1800",
        "HCCL_BUFFSIZE": "200",
        "HCCL_OP_EXPANSION_MODE": "AIV",
        "CPU_AFFINITY_CONF": "1,npu_affine:1",
    }


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["exe_mode=eager"], {"TASK_QUEUE_ENABLE": "2"}),
        (["exe_mode=acl_graph"], {"TASK_QUEUE_ENABLE": "1"}),
        (["exe_mode=npugraph_ex"], {"TASK_QUEUE_ENABLE": "1"}),
        (["comm_timeout_s=20"], {"HCCL_CONNECT_TIMEOUT": "120", "HCCL_EXEC_TIMEOUT": "20"}),
        (["comm_timeout_s=86400"], {"HCCL_CONNECT_TIMEOUT": "7200", "HCCL_EXEC_TIMEOUT": "86400"}),
        (["aiv_group=none", "deterministic=true"], {"HCCL_DETERMINISTIC": "true", "HCCL_OP_EXPANSION_MODE": None}),
        (["world_size=1"], {"HCCL_OP_EXPANSION_MODE": None, "HCCL_DETERMINISTIC": None, "HCCL_IF_BASE_PORT": None}),
        (["buffer_mb=512", "world_buffer_mb=64"], {"HCCL_BUFFSIZE": "512"}),
        (["base_port=50000", "socket_ifname=eth1"], {"HCCL_IF_BASE_PORT": "50000", "HCCL_SOCKET_IFNAME": "eth1"}),
        (["strict=true"], {"TORCH_NPU_FALLBACK_CPU_DISABLE": "1"}),
        (["cpu_affinity=false"], {"CPU_AFFINITY_CONF": None, "HCCL_SOCKET_IFNAME": None}),
    ],
)  # fmt: skip
def test_keys_reach_the_environment(overrides: list[str], wanted: dict[str, str | None]) -> None:
    made = environment(ascend("world_size=8", *overrides), {})
    assert {name: made.get(name) for name in wanted} == wanted


def test_what_the_user_has_set_stays() -> None:
    own = {"TASK_QUEUE_ENABLE": "0", "CPU_AFFINITY_CONF": "2", "HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_BUFFSIZE": "1"}
    assert not own.keys() & environment(ascend("world_size=8"), own).keys()
    assert environment(load_case("demo"), {}) == {}


@pytest.mark.parametrize(
    ("overrides", "own", "complaint"),
    [
        ([], {"HCCL_DETERMINISTIC": "true"}, "HCCL_DETERMINISTIC=true switches off the vector cores that hccl_config"),
        ([], {"HCCL_DETERMINISTIC": "STRICT"}, "aiv_group: attn_tp asks for: unset it, or set aiv_group: none"),
        (["aiv_group=none", "deterministic=true"], {"HCCL_DETERMINISTIC": "false"}, "HCCL_DETERMINISTIC=false contra"),
        ([], {"HCCL_OP_EXPANSION_MODE": "HOST"}, "HCCL_OP_EXPANSION_MODE=HOST contradicts hccl_config.aiv_group: attn"),
        (["strict=true"], {"TORCH_NPU_FALLBACK_CPU_DISABLE": "0"}, "DISABLE=0 lets ops run on the CPU, which strict"),
        (["aiv_group=none"], {"HCCL_OP_EXPANSION_MODE": "AIV"}, "contradicts hccl_config.aiv_group: none: unset it"),
    ],
)
def test_contradicting_variables_are_refused(overrides: list[str], own: dict[str, str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        environment(ascend("world_size=8", *overrides), own)


def test_the_launcher_sets_it_before_the_rank_starts() -> None:
    """Also with one rank, which takes the launcher's place."""
    code = f"""
import sys
from executor.config.load import load_case
from executor.launch.launch import launch
launch(load_case("demo", {list(ON_ASCEND)}), ["-c", "import os; print(os.environ['CPU_AFFINITY_CONF'])"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.stdout == "1,npu_affine:1\n", done.stderr
