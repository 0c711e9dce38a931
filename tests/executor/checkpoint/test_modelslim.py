"""modelslim's W8A8 in the layouts of both versions: the floats that it means, and int8 that is kept bit for bit."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.checkpoint.test_formats import SIZES, assert_kept, built, logits
from tests.modelslim import modelslim_tiny
from tests.tiny import save_tiny, save_tiny_of
from umbra.base.errors import UserError
from umbra.executor.checkpoint.formats.detect import read_scheme

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[Any, dict[str, bool]]] = {
    "dynamic": (lambda module: "W8A8_DYNAMIC", {}),
    "static attention": (lambda module: "W8A8_DYNAMIC" if ".mlp." in module else "W8A8", {}),
    "mix": (lambda module: "W8A8_MIX", {}),
    "dynamic, moved": (lambda module: "W8A8_DYNAMIC", {"moved": True}),
    "static, moved": (lambda module: "W8A8_DYNAMIC" if ".mlp." in module else "W8A8", {"moved": True}),
    "version 0, static, moved": (
        lambda module: "W8A8_DYNAMIC" if ".mlp." in module else "W8A8",
        {"moved": True, "old": True},
    ),
    "floats among them": (lambda module: "FLOAT" if "1.self_attn.o" in module else "W8A8_DYNAMIC", {}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float") / "model"
    save_tiny(folder, **SIZES)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_means_its_floats(tmp_path: Path, model: Path, layout: str) -> None:
    type_of, options = LAYOUTS[layout]
    floats = modelslim_tiny(model, tmp_path / "quantised", type_of, **options)
    none = {"quantization": {"method": "none"}}
    expected = logits(tmp_path, floats, **none)
    for settings, most in ((none, 2e-4), ({}, 0.1)):  # by int8 activations are rounded, for every 32 columns
        for ours, theirs in zip(logits(tmp_path, tmp_path / "quantised", **settings), expected, strict=True):
            assert (ours - theirs).abs().mean() < most * theirs.abs().mean()
    if not options and "FLOAT" not in map(type_of, ["model.layers.1.self_attn.o_proj"]):
        for world in (1, 2, 4):
            for rank in range(world):
                ranks = {"world_size": world}
                assert_kept(built(tmp_path / "quantised", rank, **ranks), load_file(floats / "model.safetensors"), True)


@pytest.mark.parametrize("queries", [None, 64])  # the width of their latents
@pytest.mark.parametrize("layout", ["dynamic, moved", "version 0, static, moved"])
def test_attention_over_latents_is_moved(tmp_path: Path, layout: str, queries: int | None) -> None:
    """Biases of rows that are kept in another order; heads' matrices stay floats."""
    type_of, options = LAYOUTS[layout]
    save_tiny_of(tmp_path / "model", "deepseek_v3", **SIZES | {"head_dim": None}, q_lora_rank=queries)
    chosen = lambda module: "FLOAT" if "kv_b" in module else type_of(module)  # noqa: E731
    floats = modelslim_tiny(tmp_path / "model", tmp_path / "quantised", chosen, **options)
    none: dict[str, Any] = {"quantization": {"method": "none"}, "model_name": "deepseek_v3"}
    expected = logits(tmp_path, floats, **none)
    for ours, theirs in zip(logits(tmp_path, tmp_path / "quantised", **none), expected, strict=True):
        assert (ours - theirs).abs().mean() < 1e-3 * theirs.abs().mean()  # units of static biases are rounded


def test_ranks_share_the_biases_of_modules(tmp_path: Path, model: Path) -> None:
    type_of, options = LAYOUTS["static, moved"]
    modelslim_tiny(model, tmp_path / "quantised", type_of, **options)
    whole = cast(Any, built(tmp_path / "quantised")).model.layers[0].self_attn
    assert whole.qkv_proj.bias.abs().max() > 0.1 > 0 == whole.o_proj.bias.abs().max()
    queries, keys, values = whole.qkv_proj.bias.split(whole.sizes)
    for rank in range(2):
        part = cast(Any, built(tmp_path / "quantised", rank, world_size=2)).model.layers[0].self_attn
        mine = [b.chunk(2)[rank] for b in (queries, keys, values)]
        assert torch.equal(part.qkv_proj.bias, torch.cat(mine))


@pytest.mark.parametrize(
    ("name", "kind", "error"),
    [
        ("model.layers.0.mlp.experts.0.up_proj.weight", "W4A8_DYNAMIC", "type 'W4A8_DYNAMIC' is not read"),
        ("model.layers.0.self_attn.fa_q.scale", "FAQuant", "type 'FAQuant' is not read"),
        ("model.layers.0.self_attn.o_proj.div.mul_scale", "FLOAT", "divided before a product"),
    ],
)
def test_other_types_are_refused_by_name(tmp_path: Path, model: Path, name: str, kind: str, error: str) -> None:
    modelslim_tiny(model, tmp_path / "quantised", LAYOUTS["dynamic"][0])
    path = tmp_path / "quantised" / "quant_model_description.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: kind}))
    with pytest.raises(UserError, match=f"{name}: .*{error}"):
        read_scheme(path.parent)


def test_what_adds_to_experts_is_refused(tmp_path: Path, model: Path) -> None:
    """Their biases are more than roundings."""
    modelslim_tiny(model, tmp_path / "quantised", lambda module: "W8A8")
    built(tmp_path / "quantised")
    path = tmp_path / "quantised" / "quant_model_weights-00001-of-00002.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts." in name and name.endswith("quant_bias")]:
        tensors[name] += 2
    save_file(tensors, path)
    with pytest.raises(UserError, match="experts with biases are not read"):
        built(tmp_path / "quantised")
