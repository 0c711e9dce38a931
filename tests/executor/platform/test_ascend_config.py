"""Cases on ascend, without an NPU or torch_npu: rules, HCCL groups, kernels, exchanges, and the ranks' environment."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.executor.config.case import Case
from umbra.executor.config.load import load_case, load_model_config
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.plan.sketch import sketch_of
from umbra.executor.platform.ascend.exchange import why_gathered, why_refused
from umbra.executor.platform.ascend.hccl import AI_CPU, AIV, HOST, group_options
from umbra.executor.platform.ascend.kernels import check_offsets, chosen_kernels, gemv_tokens
from umbra.executor.platform.ascend.settings import HcclSettings
from umbra.executor.platform.registry import start_environment
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.qwen3_moe.config import Qwen3MoeConfig
from umbra.ops.ascend import vector_core
from umbra.ops.ascend.weights import AscendExperts
from umbra.ops.formats import Format
from umbra.ops.parallel.partitions import GROUPS

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
        (["rest=q8"], "quantization.rest: q8 has no fused kernels on platform: ascend: leave it out"),
        (["exe_mode=eager", "enable_cache_compile=true"], "enable_cache_compile: true has nothing to keep with exe"),
        (["deterministic=true"], "deterministic: true and hccl_config.aiv_group: attn_tp exclude each other"),
        (["aiv_group=moe_tp"], "hccl_config.aiv_group: 'moe_tp' is not one of none, world, attn_tp"),
        (["base_port=80"], "ascend_config.base_port: 80 is the system's: choose 1024 or more, or 0"),
        (
            ["world_size=8", "world_buffer_mb=100", "attn_tp_buffer_mb=400"],
            "hccl_config.world_buffer_mb: 100 and hccl_config.attn_tp_buffer_mb: 400: both are the group of the same 8",
        ),
    ],
)
def test_what_ascend_cannot_do_is_named(overrides: list[str], complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        ascend(*overrides)
    assert str(raised.value).startswith("demo.yaml: ")
    assert complaint in str(raised.value)


def test_keys_of_ascend_are_refused_elsewhere() -> None:
    with pytest.raises(UserError, match="memory_gb: has no meaning on platform: cpu: leave it out"):
        load_case("demo", ["memory_gb=32"])


def environment(case: Case, given: Mapping[str, str]) -> dict[str, str]:
    return start_environment(case.platform, platform_settings(case), given)


def options(case: Case, soc: str) -> dict[str, tuple[int, int]]:
    """(MB, mode) of each group."""
    hccl = case.of_device(HcclSettings)
    options = {name: group_options(hccl, case.parallel_sizes, name, soc) for name in GROUPS}
    return {name: (o["hccl_buffer_size"], o["hccl_op_expansion_mode"]) for name, o in options.items()}


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


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["exe_mode=acl_graph"], {"TASK_QUEUE_ENABLE": "1"}),
        (["comm_timeout_s=20"], {"HCCL_CONNECT_TIMEOUT": "120", "HCCL_EXEC_TIMEOUT": "20"}),
        (["aiv_group=none", "deterministic=true"], {"HCCL_DETERMINISTIC": "true", "HCCL_OP_EXPANSION_MODE": None}),
        (["world_size=1"], {"HCCL_OP_EXPANSION_MODE": None, "HCCL_DETERMINISTIC": None, "HCCL_IF_BASE_PORT": None}),
        (["buffer_mb=512", "world_buffer_mb=64"], {"HCCL_BUFFSIZE": "512"}),
        (["base_port=50000", "socket_ifname=eth1"], {"HCCL_IF_BASE_PORT": "50000", "HCCL_SOCKET_IFNAME": "eth1"}),
        (["cpu_affinity=false"], {"CPU_AFFINITY_CONF": None, "HCCL_SOCKET_IFNAME": None}),
    ],
)
def test_keys_reach_the_environment(overrides: list[str], wanted: dict[str, str | None]) -> None:
    variables = environment(ascend("world_size=8", *overrides), {})
    assert {name: variables.get(name) for name in wanted} == wanted


def test_what_the_user_has_set_stays() -> None:
    own = {"TASK_QUEUE_ENABLE": "0", "CPU_AFFINITY_CONF": "2", "HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_BUFFSIZE": "1"}
    assert not own.keys() & environment(ascend("world_size=8"), own).keys()
    assert environment(load_case("demo"), {}) == {}


@pytest.mark.parametrize(
    ("overrides", "own", "complaint"),
    [
        ([], {"HCCL_DETERMINISTIC": "true"}, "HCCL_DETERMINISTIC=true switches off the vector cores that hccl_config"),
        ([], {"HCCL_OP_EXPANSION_MODE": "HOST"}, "HCCL_OP_EXPANSION_MODE=HOST contradicts hccl_config.aiv_group: attn"),
        (["strict=true"], {"TORCH_NPU_FALLBACK_CPU_DISABLE": "0"}, "DISABLE=0 lets ops run on the CPU, which strict"),
    ],
)
def test_contradicting_variables_are_refused(overrides: list[str], own: dict[str, str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        environment(ascend("world_size=8", *overrides), own)


def test_the_launcher_sets_it_before_the_rank_starts() -> None:
    """Also with one rank, which takes the launcher's place."""
    code = f"""
import sys
from umbra.executor.config.load import load_case
from umbra.executor.launch.launch import launch
launch(load_case("demo", {list(ON_ASCEND)}), ["-c", "import os; print(os.environ['CPU_AFFINITY_CONF'])"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.stdout == "1,npu_affine:1\n", done.stderr


LINEAR, EXPERTS = "self_attn.qkv_proj, self_attn.o_proj of layers 0-4", "mlp.experts of layers 0-4"


def in_four_bits(*overrides: str) -> Case:
    return load_case("demo", ["platform=ascend", "exe_mode=ge_graph", "method=q4", *overrides])


def kernels(case: Case, built: bool = True) -> dict[str, str]:
    return chosen_kernels(sketch_of(case).model, platform_settings(case), built)


def test_few_tokens_by_four_bits_go_to_the_vector_cores() -> None:
    assert kernels(in_four_bits("gemv_max_tokens=5")) == {
        f"{LINEAR}, 1 to 5 tokens": "gemv_w4a16 on the vector cores",
        f"{LINEAR}, 6 tokens or more": "unpack_w4a16 and mm",
        f"{EXPERTS}, 1 to 5 tokens": "fused_moe[_scores]_w4a16 on the vector cores",
        f"{EXPERTS}, 6 tokens or more": "unpack_w4a16 and npu_grouped_matmul",
    }


@pytest.mark.parametrize(
    ("override", "linear", "reason"),
    [
        ("decode_gemv=off", "npu_weight_quant_batchmatmul", "decode_gemv: off"),
        ("method=none", "mm", "the weights do not have 4 bits"),
    ],
)
def test_the_reason_for_other_kernels_is_reported(override: str, linear: str, reason: str) -> None:
    assert kernels(in_four_bits(override)) == {
        LINEAR: f"{linear} ({reason})",
        EXPERTS: f"npu_grouped_matmul ({reason})",
    }


def test_on_without_the_package_says_how_to_build_it() -> None:
    with pytest.raises(
        UserError, match=r"^case demo: .*decode_gemv: on: .* not built: run bash ops/ascend/vector_core/build\.sh$"
    ):
        gemv_tokens(platform_settings(in_four_bits("decode_gemv=on")), built=False)


def test_four_bits_without_zero_points_need_a_newer_cann() -> None:
    case, zeros, floats = (in_four_bits(*more) for more in ([], ["zero_points=true"], ["method=none"]))
    model = sketch_of(case).model
    complaint = (
        r"zero_points: false: model\.layers\.0\.mlp\.experts: npu_grouped_matmul of CANN 8\.5\.0 needs "
        r"a zero point .*: set method: q4 and zero_points: true, or install CANN 9\.0 or later$"
    )
    with pytest.raises(UserError, match=complaint):
        check_offsets(model, platform_settings(case), "8.5.0")
    for cann in ("9.0.0", "9.1.0", None):
        check_offsets(model, platform_settings(case), cann)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    for kind in ("q4", "w8a8"):  # in planes, which are unpacked before; int8
        for layer in model.modules():
            if isinstance(layer, type(experts)):
                format, meta = Format(kind, 32), torch.device("meta")
                layer.weights = AscendExperts(4, 64, 128, format, torch.bfloat16, meta, in_planes=True)  # type: ignore[assignment]
        check_offsets(model, platform_settings(case), "8.5.0")
    for other in (zeros, floats):
        check_offsets(sketch_of(other).model, platform_settings(other), "8.5.0")


SPLIT = ("world_size=8", *(f"{name}_tp_size=1" for name in ("attn", "moe", "embed", "lmhead")), "batch_size=64")


def settings(*overrides: str) -> PlatformSettings:
    return platform_settings(load_case("qwen3_30b_a3b_bf16_tp8", [*SPLIT, *overrides]))


def test_an_extension_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "umbra_ascendc.so").write_text("not a library")
    with pytest.raises(UserError, match=r"umbra_ascendc\.so: cannot be loaded: .*build it again: bash ops/ascend"):
        vector_core.load(tmp_path / "umbra_ascendc.so")


@pytest.mark.parametrize(
    ("overrides", "sizes", "reason"),
    [
        ([], {}, ""),
        (["ascend_config.exchange=false"], {}, "ascend_config.exchange: false"),
        (["attn_tp_size=2"], {}, "attn_tp_size and moe_tp_size are not both 1"),
        (["world_size=1"], {}, "1 ranks, not 2 to 768"),
        ([], dict(num_experts=1032), "1032 experts, not 1 to 1024"),
        ([], dict(num_experts_per_tok=17), "17 experts a token, not 1 to 16"),
        ([], dict(hidden_size=8193), "8193 columns, not 1024 to 8192"),
    ],
)
def test_cases(overrides: list[str], sizes: dict[str, Any], reason: str) -> None:
    model = load_model_config(load_case("qwen3_235b_a22b_bf16_tp16"))
    assert isinstance(model, Qwen3MoeConfig)
    assert why_gathered(settings(*overrides), dataclasses.replace(model, **sizes)) == reason


@pytest.mark.parametrize(
    ("soc", "cann", "reason"),
    [
        ("Ascend910_9391", "8.5.0", ""),
        ("Ascend910B3", "9.1.0", "Ascend910B3 is no Atlas A3"),
        ("Ascend910_9391", "8.3.RC1", "needs CANN 8.5, this is 8.3.RC1"),
        ("Ascend910_9391", None, "needs CANN 8.5, this is an unknown version"),
    ],
)
def test_devices(soc: str, cann: str | None, reason: str) -> None:
    assert why_refused(soc, cann) == reason
