"""The choice of kernels for a case on ascend, its report and its refusals, without an NPU or torch_npu."""

import pytest
import torch

from executor.config.case import Case
from executor.config.load import load_case
from executor.launch.platform_settings import platform_settings
from executor.platform.ascend.kernels import cache_line, check_offsets, chosen_kernels, gemv_tokens
from executor.run.model_sketch import sketch_of
from ops.ascend import vector_core
from ops.ascend.cann import Abilities
from ops.ascend.weights import AscendExperts
from ops.format import Format
from umbra.errors import UserError

LINEAR, EXPERTS = "self_attn.qkv_proj, self_attn.o_proj of layers 0-4", "mlp.experts of layers 0-4"
NOT_BUILT = "decode_gemv: the kernels are not built: bash ops/ascend/vector_core/build.sh"


def ascend(*overrides: str) -> Case:
    return load_case("demo", ["platform=ascend", "exe_mode=ge_graph", "method=q4", *overrides])


def kernels(case: Case, built: bool = True) -> dict[str, str]:
    return chosen_kernels(sketch_of(case).model, platform_settings(case), built)


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_few_tokens_by_four_bits_go_to_the_vector_cores(wanted: str) -> None:
    assert kernels(ascend(f"decode_gemv={wanted}", "gemv_max_tokens=5")) == {
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
    assert kernels(ascend(override)) == {
        LINEAR: f"{linear} ({reason})",
        EXPERTS: f"npu_grouped_matmul ({reason})",
    }


def test_auto_without_the_package_goes_the_other_way() -> None:
    assert gemv_tokens(platform_settings(ascend()), built=False) == 0
    assert kernels(ascend(), built=False) == {
        LINEAR: f"npu_weight_quant_batchmatmul ({NOT_BUILT})",
        EXPERTS: f"npu_grouped_matmul ({NOT_BUILT})",
    }


def test_on_without_the_package_says_how_to_build_it() -> None:
    with pytest.raises(
        UserError, match=r"^case demo: .*decode_gemv: on: .* not built: run bash ops/ascend/vector_core/build\.sh$"
    ):
        gemv_tokens(platform_settings(ascend("decode_gemv=on")), built=False)


def test_on_with_other_weights_names_the_first() -> None:
    message = r"^case demo: .*: model\.layers\.0\.self_attn\.qkv_proj: the weights do not have 4 bits: set it to auto$"
    with pytest.raises(UserError, match=message):
        kernels(ascend("decode_gemv=on", "method=none"))


@pytest.mark.parametrize("offload", [[], ["offload_config.mode=fixed", "slots=2", "exe_mode=acl_graph"]])
def test_four_bits_without_zero_points_need_a_newer_cann(offload: list[str]) -> None:
    case, zeros, floats = (ascend(*more, *offload) for more in ([], ["zero_points=true"], ["method=none"]))
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
    for layer in model.modules():
        if isinstance(layer, type(experts)):
            format, meta = Format("q4", 32), torch.device("meta")
            layer.weights = AscendExperts(4, 64, 128, format, torch.bfloat16, meta, in_planes=True)  # type: ignore[assignment]
    check_offsets(model, platform_settings(case), "8.5.0")  # these are unpacked before
    for other in (zeros, floats):
        check_offsets(sketch_of(other).model, platform_settings(other), "8.5.0")


def test_an_extension_that_cannot_be_loaded_is_one_line(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("build") / "umbra_ascendc.so"
    path.write_text("not a library")
    told = r"umbra_ascendc\.so: cannot be loaded: .*build it again: bash ops/ascend/vector_core"
    with pytest.raises(UserError, match=told):
        vector_core.load(path)


@pytest.mark.parametrize(
    ("tiles", "kernel"), [(True, "npu_qkv_rms_norm_rope_cache"), (False, "npu_scatter_nd_update_")]
)
def test_the_kernel_that_writes_the_cache_is_named(tiles: bool, kernel: str) -> None:
    said = cache_line(Abilities(renormalised=True, tiled_cache=tiles))["KV cache"]
    assert said.startswith(kernel)
    assert ("need CANN" in said) != tiles
