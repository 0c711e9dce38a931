"""MiniMax-M2 as it is published: every layout is read with the values that it stands for, kept where it can be."""

import itertools
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from executor.checkpoint.formats.detect import read_scheme
from executor.checkpoint.load import load_checkpoint
from executor.config.load import load_model_config
from executor.engine.building import build_of
from executor.run.defaults import case_of_checkpoint
from models.layers.base import layers_of
from models.layers.experts import Experts
from models.layers.linear import RowLinear
from models.registry import model_class
from ops import load_ops
from ops.cpu import engine
from ops.cpu.matrix import NativeExperts
from ops.parallel.join import place_of
from tests.m2_layouts import (
    CONTRADICTIONS,
    LAYOUTS,
    MOE,
    Layout,
    official,
    rewrite,
    save_m2,
)  # fmt: skip
from tests.tiny import make_runner, tiny_case
from umbra.cli import execute
from umbra.commands.inspect_checkpoint import inspect
from umbra.commands.logits import prefill_logits
from umbra.errors import UserError

pytestmark = pytest.mark.slow
PROMPTS = [[5, 17, 3, 88, 2, 41], [7], list(range(130, 153))]
EXPERT = f"{MOE}.experts.2.w3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_m2(tmp_path_factory.mktemp("float") / "model")


def case_for(checkpoint: Path, **sections: Any) -> Any:
    return tiny_case(checkpoint.parent, checkpoint, model_name="minimax_m2", **sections)


def logits(checkpoint: Path, method: str = "none", **sections: Any) -> list[Tensor]:
    case = case_for(checkpoint, quantization={"method": method}, **sections)
    return prefill_logits(make_runner(case, checkpoint.parent), PROMPTS)


def built(checkpoint: Path, rank: int = 0, **sections: Any) -> nn.Module:
    """This rank's model with its weights, without the other ranks."""
    case = case_for(checkpoint, **sections)
    engine.start(1, "auto")
    build = build_of(case, load_ops("cpu"), place_of(case.parallel_sizes, rank, {}), torch.device("cpu"), True)
    model = cast(Any, model_class("minimax_m2")(load_model_config(case), build))
    load_checkpoint(model, checkpoint, read_scheme(checkpoint), model.ignores, progress=False)
    return cast(nn.Module, model)


def kinds(model: nn.Module) -> list[tuple[str, str, str]]:
    """The kinds of formats that each layer's experts, o_proj and merged q, k and v are kept in."""
    found: dict[str, Any] = dict(layers_of(model))
    return [
        (
            found[f"model.layers.{i}.block_sparse_moe.experts"].weights.w13.format.kind,
            *(found[f"model.layers.{i}.self_attn.{name}"].weight.packed.format.kind for name in ("o_proj", "qkv_proj")),
        )
        for i in range(2)
    ]


@pytest.mark.parametrize("name", [*LAYOUTS, *CONTRADICTIONS])
def test_a_layout_means_its_floats(tmp_path: Path, model: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout, count = CONTRADICTIONS.get(name) or (LAYOUTS[name], 0)
    floats = layout.write(model, tmp_path / "published")
    ours = logits(tmp_path / "published")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    for mine, expected in zip(ours, logits(floats), strict=True):
        assert expected.std() > 0.2  # there is something to compare
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0)
    assert len(said) == (count > 0)
    assert not count or f": {count} modules are not stored as the config says; they are read as the" in said[0]
    facts = inspect(tmp_path / "published")
    assert facts["problems"] == []
    assert sum(e["modules"] for e in (facts["quantization"], *facts["quantization"]["mixed_with"])) == sum(
        layout.ways(module) is not None for module in load_file(floats / "model.safetensors")
    )
    assert len(facts["quantization"]["contradictions"]) == count
    assert facts["total"]["files"] == 3
    assert {c["name"] for c in facts["components"]} - {"ignored"} == {
        "embedding", "attention", "router", "experts", "norms", "head"
    }  # fmt: skip


Q4, F8, F32 = "q4", "f8", "float32"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("official", [(F8, F8, F8)] * 2),
        ("mratsim FP8 and INT4", [(Q4, F8, F8)] * 2),
        ("EliasOenal, AWQ beside FP8 attention", [(Q4, F8, F8)] * 2),
        ("QuantTrio M2", [(Q4, Q4, Q4)] * 2),
        ("QuantTrio M2.5", [(F32, F32, F32), (Q4, F32, F32)]),
        ("last layer's experts in floats", [(Q4, F32, F32), (F32, F32, F32)]),
        ("AWQ of one value matrix", [(Q4, F32, F32)] * 2),
        ("AWQ of some experts of a layer", [(F32, F32, F32)] * 2),
    ],
)
def test_what_is_kept_is_decided_by_layer_and_module(
    tmp_path: Path, model: Path, name: str, expected: list[tuple[str, str, str]]
) -> None:
    layout = LAYOUTS.get(name) or CONTRADICTIONS[name][0]
    floats = layout.write(model, tmp_path / "published")
    ours = built(tmp_path / "published")
    assert kinds(ours) == expected
    check_values(ours, load_file(floats / "model.safetensors"))


def check_values(model: nn.Module, means: dict[str, Tensor]) -> None:
    """Experts and o_proj of this rank equal the checkpoint's to the last bit."""
    for path, layer in layers_of(model):
        if isinstance(layer, Experts):
            native = cast(NativeExperts, layer.weights)
            for expert, (which, module) in itertools.product(range(layer.experts), layer.names.items()):
                mean = means[f"{path}.{expert}.{module}.weight"].float()
                assert torch.equal(
                    native.dequantised(expert, which), mean[:, layer.part] if which == "down" else mean[layer.part]
                )
        elif isinstance(layer, RowLinear):
            mine = cast(Any, layer.weight).packed.dequantised(0, layer.weight.rows)
            assert torch.equal(mine, means[f"{path}.weight"].float()[:, layer.part])


@pytest.mark.parametrize("name", ["official", "mratsim FP8 and INT4"])
def test_two_ranks_split_inside_blocks_and_groups(tmp_path: Path, model: Path, name: str) -> None:
    """192 of an expert's 384 columns or rows: one and a half blocks or groups of 128."""
    means = load_file(LAYOUTS[name].write(model, tmp_path / "published") / "model.safetensors")
    for rank in range(2):
        check_values(built(tmp_path / "published", rank, world_size=2), means)


@pytest.mark.parametrize(("method", "error"), [("auto", 0.02), ("none", 0.02), ("q8", 0.03), ("q4", 0.4)])
def test_the_original_is_kept_or_becomes_floats_or_is_quantised_anew(
    tmp_path: Path, model: Path, method: str, error: float
) -> None:
    """The error of a token's logits relative to their spread, in bfloat16, against the exact values in float32."""
    floats = LAYOUTS["official"].write(model, tmp_path / "published")
    ours = torch.cat(logits(tmp_path / "published", method, model_config={"dtype": "bfloat16"}))
    theirs = torch.cat(logits(floats))
    assert 1e-4 < float(((ours - theirs).abs().mean(-1) / theirs.std(-1)).median()) < error


@pytest.mark.parametrize(("name", "start"), [("official", 0), ("QuantTrio M2.5", 1)])
def test_experts_with_shadows_are_kept_as_others(tmp_path: Path, model: Path, name: str, start: int) -> None:
    """The same bits, wherever experts are. The slots of all layers with shadows have one size."""
    LAYOUTS[name].write(model, tmp_path / "published")
    offload = {"mode": "fixed", "slots": 5, "start_layer": start, "measure_s": 0.01}
    with_shadows = logits(tmp_path / "published", "auto", offload_config=offload)
    for mine, expected in zip(with_shadows, logits(tmp_path / "published", "auto"), strict=True):
        assert torch.equal(mine, expected)
    if start:
        with pytest.raises(UserError, match=r"start_layer: 0: no layers with experts of one size and format"):
            logits(tmp_path / "published", "auto", offload_config=offload | {"start_layer": 0})


def test_gate_names_no_other_module(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": official()}))
    scheme = read_scheme(tmp_path)
    assert scheme.encoding(f"{MOE}.gate") is scheme.encoding("lm_head") is None
    assert scheme.encoding(f"{MOE}.gate_up") is not None
    assert scheme.encoding(f"{MOE}.experts.0.agate") is not None
    assert scheme.encoding("model.layers.3.self_attn.q_proj") is not None


def test_without_files_the_config_decides(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = LAYOUTS["QuantTrio M2.5"]
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": layout.config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scheme = read_scheme(tmp_path)
    assert scheme.kept("model.layers.0.block_sparse_moe.experts.0.w1") is None
    assert scheme.kept("model.layers.1.block_sparse_moe.experts.0.w1") is not None
    case = tmp_path / "case.yaml"
    case.write_text(f"{{model_name: minimax_m2, model_path: {tmp_path}, platform: ascend, exe_mode: eager, "
                    "data_config: {prompts: [x], input_max_len: 8, max_new_tokens: 4}}")  # fmt: skip
    execute(["run", str(case), "--plan"])
    assert "experts' scales" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layout", "change", "complaint"),
    [
        (LAYOUTS["official"], lambda c, t: t.pop(f"{EXPERT}.weight_scale_inv"),
         rf"{EXPERT}\.weight has type F8_E4M3, expected one of BF16, F16, F32"),
        (LAYOUTS["official"], lambda c, t: t.update({f"{EXPERT}.weight_scale_inv": torch.ones(3, 3)}),
         rf"{EXPERT}\.weight_scale_inv has shape \[3, 3\], expected \[3, 2\]"),
        (LAYOUTS["official"], lambda c, t: t.pop(f"{MOE}.e_score_correction_bias"),
         rf"1 tensors missing: {MOE}\.e_score_correction_bias"),
        (LAYOUTS["QuantTrio M2.5"], lambda c, t: t.update({f"{EXPERT}.scales": torch.ones(3)}),
         rf"{EXPERT}\.scales, |does not know: {EXPERT}\.scales"),
        (LAYOUTS["QuantTrio M2"], lambda c, t: t.update({f"{EXPERT}.weight": torch.ones(384, 256)}),
         rf"does not know: {EXPERT}\.weight"),
        (LAYOUTS["transformers' names"], lambda c, t: t.update({f"{MOE}.gate.weight": torch.ones(8, 256)}),
         r"mlp\.gate\.weight and model\.layers\.0\.block_sparse_moe\.gate\.weight are two names of one|"
         r"block_sparse_moe\.gate\.weight and model\.layers\.0\.mlp\.gate\.weight are two names of one"),
        (LAYOUTS["GPTQ"], lambda c, t: t.update(
            {"model.layers.0.self_attn.k_proj.g_idx": t["model.layers.0.self_attn.k_proj.g_idx"].flip(0)}),
         r"self_attn\.k_proj\.g_idx: inputs are not in the order of their groups: desc_act is not supported"),
        (LAYOUTS["mratsim FP8 and INT4"], lambda c, t: c["config_groups"]["group_0"].update(format="nvfp4"),
         r"group_0: format: 'nvfp4' must be one of pack-quantized, int-quantized, float-quantized"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(tmp_path: Path, model: Path, layout: Layout, change: Any, complaint: str) -> None:
    layout.write(model, tmp_path / "published")
    rewrite(tmp_path / "published", change)
    with pytest.raises(UserError, match=complaint) as raised:
        built(tmp_path / "published")
    assert len(str(raised.value)) < 2000


REFUSED = {
    "MiniMax-M3": {"model_type": "minimax_m3_vl", "architectures": ["MiniMaxM3ForConditionalGeneration"]},
    "MiniMax-01": {"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"]},
    "MiniMax-M1": {"model_type": "minimax_m1", "architectures": ["MiniMaxM1ForCausalLM"]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_easily_confused_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REFUSED[name]))
    data = "{prompts: [x], input_max_len: 8, max_new_tokens: 4}"
    case = f"{{model_name: minimax_m2, model_path: {tmp_path}, data_config: {data}}}"
    (tmp_path / "case.yaml").write_text(case)
    complaint = rf"\({name}, another architecture\) is not supported, only qwen3_moe, minimax_m2"
    for start in (
        lambda: execute(["inspect", str(tmp_path)]),
        lambda: execute(["run", str(tmp_path / "case.yaml")]),
        lambda: case_of_checkpoint(tmp_path, {}),
    ):
        with pytest.raises(UserError, match=complaint):
            start()


def test_early_files_that_say_minimax_are_read(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    early = config | {"model_type": "minimax", "architectures": ["MiniMaxM2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(early))
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    facts = inspect(tmp_path)
    assert facts["architecture"]["model_type"] == "minimax_m2"
    assert facts["problems"] == []
    assert case_of_checkpoint(tmp_path, {}).model_name == "minimax_m2"
