"""Scenarios of every family: the same logits as transformers' for all configuration options, what known mistakes would
do to them, and what is refused (`tests/families` lists all scenarios)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.families import ROWS
from tests.families.row import Row
from tests.models.family_mistakes import Mistake
from tests.quantised import is_quantised, quantise_tiny
from tests.tiny import make_runner, oracle_logits, rounding_bound, save_tiny_of, tiny_case
from tests.variants import covering, thorough_after
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.commands.inspect_checkpoint import inspect_checkpoint
from umbra.commands.logits import collect_logits
from umbra.models.build import Build, Formats
from umbra.models.layers.base import layers_of
from umbra.models.registry import family_in, model_class, read_config
from umbra.models.rope import RopeConfig
from umbra.ops import load_ops
from umbra.ops.formats import FORMATS
from umbra.ops.parallel.groups import Parallel

PROMPTS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(30, 53))]
RUNS: dict[str, dict[str, Any]] = {
    "graph": {"exe_mode": "graph"},
    "graph_in_chunks": {"exe_mode": "graph", "data_config": {"chunked_prefill_size": 5}},
    "pages_of_2": {"cache_config": {"page_size": 2}},
}
WAYS: list[tuple[Row, str, bool, dict[str, Any]]] = [
    # Every second one with transformers' own config.json.
    (row, variant, i % 2 == 0, {})
    for row in ROWS.values()
    for i, variant in enumerate(row.names())
]
OTHER_RUNS = covering(list(ROWS.values()), ["tiny"], [True], list(RUNS.values()))
MISTAKES = [
    value
    for row in ROWS.values()
    for value in thorough_after(2, [(row, name, mistake) for name, mistake in row.mistakes.items()])
]


def logits_of(folder: Path, family: str, steps: int = 5, **sections: Any) -> dict[str, np.ndarray]:
    case = tiny_case(folder.parent, folder, model_name=family, **sections)
    return collect_logits(make_runner(case, folder.parent), PROMPTS, steps)


def largest_error(arrays: dict[str, np.ndarray], oracle: PreTrainedModel) -> float:
    """Returns the largest difference between a packed prefill of three lengths with decoding behind it, and one full
    forward of each sequence."""
    errors = []
    for i, prompt in enumerate(PROMPTS):
        ids = arrays[f"ids_{i}"].tolist()
        assert ids[: len(prompt)] == prompt
        expected = oracle_logits(oracle, ids).numpy()
        assert expected.std() > 0.5  # the comparison has something to compare
        errors.append(np.abs(np.concatenate([arrays[f"prefill_{i}"], arrays[f"decode_{i}"]]) - expected).max())
    return float(max(errors))


@pytest.mark.parametrize(("row", "variant", "published", "sections"), [*WAYS, *OTHER_RUNS], ids=str)
def test_logits_equal_transformers(
    tmp_path: Path, row: Row, variant: str, published: bool, sections: dict[str, Any]
) -> None:
    oracle = row.save(tmp_path / "model", published, **row.variant(variant))
    arrays = logits_of(tmp_path / "model", row.name, **sections)
    assert largest_error(arrays, oracle) < rounding_bound(oracle, PROMPTS)


@pytest.mark.parametrize("row", ROWS.values(), ids=str)
@pytest.mark.parametrize(("method", "most"), [("q8", 0.1), ("q4", 0.4)])
def test_quantised_logits_stay_close(tmp_path: Path, row: Row, method: str, most: float) -> None:
    """Also those of the shared expert; gates and routers stay floats."""
    widths = dict(hidden_size=64, intermediate_size=64) | {row.inner: 32 if row.inner.startswith("moe") else 64}
    oracle = row.save(tmp_path / "model", **widths, initializer_range=0.1)
    sections = {"quantization": {"method": method, "group_size": 32, "keep_packed": False}}
    arrays = logits_of(tmp_path / "model", row.name, steps=0, **sections)
    expected = np.concatenate([oracle_logits(oracle, prompt).numpy() for prompt in PROMPTS])
    quantised = np.concatenate([arrays[f"prefill_{i}"] for i in range(len(PROMPTS))])
    assert np.abs(quantised - expected).mean() < most * np.abs(expected).mean()


@pytest.mark.parametrize("format", ["fp8", "awq", "gptq"])
def test_heads_matrices_are_dequantised(tmp_path: Path, format: str) -> None:
    """Also where blocks of a scale have rows of several heads, as of GLM-4.7-Flash, the last are smaller, and rows are
    kept in another order. AutoAWQ leaves one module of DeepSeek's in floats."""
    widths = dict(hidden_size=256, intermediate_size=160, moe_intermediate_size=128, kv_lora_rank=64, v_head_dim=32)
    save_tiny_of(tmp_path / "model", "deepseek_v3", **widths, qk_nope_head_dim=40, initializer_range=0.1)
    left, path = "kv_a_proj_with_mqa" if format == "awq" else "none", tmp_path / "quantised"
    more: dict[str, Any] = {"modules_to_not_convert": ["mlp.gate", left]} if format == "awq" else {}
    chosen = lambda name: is_quantised(name) and left not in name  # noqa: E731
    floats = quantise_tiny(tmp_path / "model", path, format, quantised=chosen, **more)
    theirs = logits_of(floats, "deepseek_v3", 0)
    for method, most in (("none", 1e-5), ("auto", 0.1)):  # products with what is kept have activations of 8 bits
        ours = logits_of(path, "deepseek_v3", 0, quantization={"method": method, "keep_packed": False})
        for name, expected in theirs.items():
            assert np.abs(ours[name] - expected).sum() <= most * np.abs(expected).sum()


@pytest.mark.parametrize("official", ["Kimi-K2-Thinking", "Kimi-K2.5"])
def test_kimis_experts_are_kept_in_4_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str], official: str) -> None:
    """The official config with a small model's sizes; K2.5 also sees pictures."""
    widths = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, initializer_range=0.1)
    save_tiny_of(tmp_path / "model", "deepseek_v3", **widths, n_group=1, topk_group=1)
    path, experts = tmp_path / "kimi", lambda name: ".experts." in name
    floats = quantise_tiny(tmp_path / "model", path, "pack-quantized", 32, 4, True, quantised=experts)
    tensors = load_file(path / "model.safetensors")
    config, sizes = (json.loads((at / "config.json").read_text()) for at in (ROOT / "checkpoints" / official, floats))
    text = config.get("text_config", config)
    text |= {key: value for key, value in sizes.items() if key in text and key not in ("model_type", "architectures")}
    text["rope_scaling"] = sizes["rope_parameters"]
    if text is not config:
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        tensors |= {"vision_tower.patch_embed.proj.weight": torch.ones(3), "mm_projector.proj.0.weight": torch.ones(3)}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    theirs = logits_of(floats, "deepseek_v3", 0)
    ours = logits_of(path, "deepseek_v3", 0, quantization={"method": "none"})
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, atol=1e-4)
    inspect_checkpoint(path, None, [], None)
    said = capsys.readouterr().out
    assert "24 modules in pack-quantized" in said
    assert "warning" not in said


@pytest.mark.parametrize(
    ("row", "folder", "billions", "rope", "width"),
    [(row, *official) for row in ROWS.values() for official in row.official],
    ids=str,
)
def test_official_configs_are_models_of_their_size(
    row: Row, folder: str, billions: float, rope: RopeConfig, width: int
) -> None:
    where = ROOT / "checkpoints" / folder
    assert family_in(where) == row.name
    config: Any = read_config(where, row.name)
    assert (config.rope, config.head_dim) == (rope, width)
    plain = FORMATS["bfloat16"]
    formats, meta = Formats(plain, plain, plain), torch.device("meta")
    model = model_class(row.name)(config, Build(load_ops("reference"), Parallel(), formats, torch.bfloat16, meta, 8))
    assert sum(layer.elements for _, layer in layers_of(model)) == pytest.approx(billions * 1e9, abs=0.05e9)


@pytest.mark.parametrize(
    ("row", "name", "mistake"), MISTAKES, ids=lambda value: None if callable(value) else str(value)
)
def test_a_known_mistake_changes_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row, name: str, mistake: Mistake
) -> None:
    """By far more than the tests of equality allow, so that these would fail."""
    oracle = row.save(tmp_path / "model", **row.variant(name.partition(" ")[2] or "tiny"))
    mistake(monkeypatch)
    assert largest_error(logits_of(tmp_path / "model", row.name), oracle) > 0.03


@pytest.mark.parametrize("row", ROWS.values(), ids=str)
def test_every_tensor_is_used_and_there(tmp_path: Path, row: Row) -> None:
    row.save(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    last = next(name for name in tensors if row.last in name)
    for name in (last, "model.layers.1.self_attn.e_score_correction_bias", "model.layers.1.self_attn.o_proj.bias"):
        changed: dict[str, Tensor] = {n: t for n, t in tensors.items() if n != name}
        save_file(changed if name in tensors else tensors | {name: torch.ones(3)}, path)
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            logits_of(tmp_path / "model", row.name)


def test_biases_of_zeros_that_gptq_adds_change_nothing(tmp_path: Path) -> None:
    """As in the official GPTQ files of Qwen: of every quantised module, beside those of queries, keys and values."""
    save_tiny_of(tmp_path / "model", "qwen2_moe", hidden_size=64, moe_intermediate_size=32)
    floats, path = quantise_tiny(tmp_path / "model", tmp_path / "gptq", "gptq", 32, 4, True), tmp_path / "gptq"
    tensors = load_file(path / "model.safetensors")
    rows = {name.removesuffix("qweight"): t.shape[1] for name, t in tensors.items() if name.endswith("qweight")}
    tensors = {f"{module}bias": torch.zeros(count) for module, count in rows.items()} | tensors
    save_file(tensors, path / "model.safetensors")
    method = {"quantization": {"method": "none"}}
    theirs, ours = (logits_of(folder, "qwen2_moe", 0, **method) for folder in (floats, path))
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, atol=1e-4)
    for name, bias in (("experts.2.up_proj", torch.eye(1, 32)[0]), ("gate", torch.zeros(8))):
        save_file(tensors | {f"model.layers.1.mlp.{name}.bias": bias}, path / "model.safetensors")
        with pytest.raises(UserError, match=rf"1 tensors that the model does not know: .*\.{name}\.bias"):
            logits_of(path, "qwen2_moe")


def test_only_layers_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    oracle = save_tiny_of(tmp_path / "model", "glm4_moe")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path) | {
        f"model.layers.2.{name}": torch.ones(3) for name in ("eh_proj.weight", "mlp.gate.weight")
    }
    save_file(tensors, path)
    assert largest_error(logits_of(tmp_path / "model", "glm4_moe"), oracle) < 1e-4
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(3)}, path)
    with pytest.raises(UserError, match=r"model\.layers\.3\.eh_proj"):
        logits_of(tmp_path / "model", "glm4_moe")


def test_hy3_is_read_by_the_names_of_transformers_modules(tmp_path: Path) -> None:
    oracle = save_tiny_of(tmp_path / "model", "hy_v3")
    path = tmp_path / "model" / "model.safetensors"
    tensors, names = load_file(path), oracle.state_dict().keys()
    own = {"mlp.router.gate": "mlp.gate", "expert_bias": "e_score_correction_bias", "shared_mlp": "shared_experts"}
    for theirs, ours in own.items():
        tensors = {name.replace(theirs, ours): tensor for name, tensor in tensors.items()}
    assert tensors.keys() - names == {name for name in tensors if ".experts." in name}
    save_file(tensors, path, {"format": "pt"})
    assert largest_error(logits_of(tmp_path / "model", "hy_v3"), oracle) < 1e-4


@pytest.mark.parametrize(
    ("row", "change", "complaint"), [(row, *refused) for row in ROWS.values() for refused in row.refused], ids=str
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, row: Row, change: dict[str, Any], complaint: str
) -> None:
    row.save(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=rf"^{path}: {complaint}") as raised:
        make_runner(tiny_case(tmp_path, tmp_path / "model", model_name=row.name), tmp_path)
    assert str(raised.value).isprintable()
