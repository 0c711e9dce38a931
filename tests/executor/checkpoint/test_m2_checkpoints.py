"""MiniMax-M2 as it is published: every layout is read with the values that it stands for, kept where it can be."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.m2_layouts import CONTRADICTIONS, LAYOUTS, MOE, Layout, rewrite, save_m2
from tests.tiny import make_runner, tiny_case
from umbra.base.errors import UserError
from umbra.commands.inspect_checkpoint import inspect
from umbra.commands.logits import prefill_logits
from umbra.executor.checkpoint.formats.detect import read_scheme
from umbra.executor.checkpoint.load import load_checkpoint
from umbra.executor.config.load import load_model_config
from umbra.executor.plan.weight_formats import build_of
from umbra.models.layers.base import layers_of
from umbra.models.registry import model_class
from umbra.ops import load_ops
from umbra.ops.cpu import engine
from umbra.ops.parallel.join import parallel_of

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
    build = build_of(case, load_ops("cpu"), parallel_of(case.parallel_sizes, rank, {}), torch.device("cpu"), True)
    model = cast(Any, model_class("minimax_m2")(load_model_config(case), build))
    load_checkpoint(model, checkpoint, read_scheme(checkpoint), model.ignores, progress=False)
    return cast(nn.Module, model)


def kinds(model: nn.Module) -> list[tuple[str, str, str]]:
    """The kinds of formats that each layer's experts, o_proj and q, k and v are kept in."""
    layers: dict[str, Any] = dict(layers_of(model))
    return [
        (
            layers[f"model.layers.{i}.block_sparse_moe.experts"].weights.w13.format.kind,
            *(
                "+".join(part.packed.format.kind for part in layers[f"model.layers.{i}.self_attn.{name}"].weight.parts)
                for name in ("o_proj", "qkv_proj")
            ),
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
        "embedding",
        "attention",
        "router",
        "experts",
        "norms",
        "head",
    }


Q4, F8, F32 = "q4", "f8", "float32"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("official", [(F8, F8, F8)] * 2),
        ("mratsim FP8 and INT4", [(Q4, F8, F8)] * 2),
        ("QuantTrio M2.5", [(F32, F32, F32), (Q4, F32, F32)]),
        ("last layer's experts in floats", [(Q4, F32, F32), (F32, F32, F32)]),
        ("AWQ of one value matrix", [(Q4, F32, "float32+q4")] * 2),
    ],
)
def test_what_is_kept_is_decided_by_layer_and_module(
    tmp_path: Path, model: Path, name: str, expected: list[tuple[str, str, str]]
) -> None:
    layout = LAYOUTS.get(name) or CONTRADICTIONS[name][0]
    layout.write(model, tmp_path / "published")
    assert kinds(built(tmp_path / "published")) == expected


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


@pytest.mark.parametrize(
    ("layout", "change", "complaint"),
    [
        (
            LAYOUTS["official"],
            lambda c, t: t.update({f"{EXPERT}.weight_scale_inv": torch.ones(3, 3)}),
            rf"{EXPERT}\.weight_scale_inv has shape \[3, 3\], expected \[3, 2\]",
        ),
        (
            LAYOUTS["QuantTrio M2.5"],
            lambda c, t: t.update({f"{EXPERT}.scales": torch.ones(3)}),
            rf"{EXPERT}\.scales, |does not know: {EXPERT}\.scales",
        ),
        (
            LAYOUTS["transformers' names"],
            lambda c, t: t.update({f"{MOE}.gate.weight": torch.ones(8, 256)}),
            r"mlp\.gate\.weight and model\.layers\.0\.block_sparse_moe\.gate\.weight are two names of one|"
            r"block_sparse_moe\.gate\.weight and model\.layers\.0\.mlp\.gate\.weight are two names of one",
        ),
        (
            LAYOUTS["mratsim FP8 and INT4"],
            lambda c, t: c["config_groups"]["group_0"].update(format="nvfp4"),
            r"group_0: format: 'nvfp4' must be one of pack-quantized, int-quantized, float-quantized",
        ),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, model: Path, layout: Layout, change: Any, complaint: str) -> None:
    layout.write(model, tmp_path / "published")
    rewrite(tmp_path / "published", change)
    with pytest.raises(UserError, match=complaint) as raised:
        built(tmp_path / "published")
    assert len(str(raised.value)) < 2000
