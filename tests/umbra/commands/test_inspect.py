"""The report about a checkpoint, made without reading weights: bytes, formats, flaws, and the part that a rank
keeps."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command import umbra
from tests.mtp import Oracle
from tests.quantised import mxfp4_tiny, quantise_tiny
from tests.tiny import make_runner, save_tiny, save_tiny_of, write_case
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.cli import execute
from umbra.commands.inspect_checkpoint import inspect, inspect_rank
from umbra.executor.config.case import DraftSettings
from umbra.executor.config.load import load_case
from umbra.executor.plan.sketch import MTP, kind_of
from umbra.models.causal_lm import CausalLM
from umbra.models.layers.attention import PagedAttention
from umbra.models.layers.base import layers_of

DEMO = ROOT / "checkpoints/austen_moe"
SIZES = dict(hidden_size=64, moe_intermediate_size=32, num_experts=4)
GATES = {"pattern": "model.layers.*.mlp.gate", "of": 2, "modules": [f"model.layers.{i}.mlp.gate" for i in range(2)]}
HEAD = {"pattern": "lm_head", "of": 1, "modules": ["lm_head"]}
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def data_bytes(folder: Path) -> int:
    """Returns the bytes of all files, without their headers."""
    files = [path.read_bytes() for path in folder.glob("*.safetensors")]
    return sum(len(data) - 8 - int.from_bytes(data[:8], "little") for data in files)


def by_name(facts: dict[str, Any]) -> dict[str, tuple[int, int, dict[str, int]]]:
    return {c["name"]: (c["tensors"], c["nbytes"], c["types"]) for c in facts["components"]}


def kept(model: CausalLM) -> tuple[dict[str, int], int]:
    """(bytes of weights by component, bytes of the KV cache) of a model that is really there."""
    weights: dict[str, int] = {}
    for path, layer in layers_of(model):
        kind = kind_of(model, path, layer)
        weights[kind] = weights.get(kind, 0) + layer.nbytes
    attention = [layer for layer in model.modules() if isinstance(layer, PagedAttention)]
    return weights, sum(layer.k_cache.nbytes + layer.v_cache.nbytes for layer in attention)


def counted(rank: dict[str, Any]) -> tuple[dict[str, int], int]:
    weights = dict(rank["weights"])
    weights["experts"] += weights.pop("experts' scales and biases", 0)
    del weights["rotary"]  # no layer's weight
    return weights, rank["kv_cache_nbytes"]


def test_the_command_prints_what_it_writes(tmp_path: Path) -> None:
    done = umbra("inspect", str(DEMO), "--case", "demo", "--json", str(tmp_path / "facts.json"))
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "facts.json").read_text())
    for number in (facts["total"]["tensor_nbytes"], facts["rank"]["weights_nbytes"], facts["rank"]["kv_cache_nbytes"]):
        assert f"{number:,}" in done.stdout
    assert "complete: every tensor is known, every weight of the model is there" in done.stdout
    assert "cpu, 1 rank(s)\n  linear layers in q8 in groups of 32, head in q8" in done.stdout


def test_a_quantised_format_and_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "model", **SIZES)
    folder = tmp_path / "quantised"
    quantise_tiny(tmp_path / "model", folder, "awq")
    case = write_case(tmp_path / "tiny.yaml", folder)
    execute(["inspect", str(folder), "--case", str(case), "--json", str(tmp_path / "facts.json")])
    facts = json.loads((tmp_path / "facts.json").read_text())
    quantization = facts["quantization"]
    assert (quantization["bits"], quantization["group_size"], quantization["zero_points"]) == (4, 32, True)
    assert quantization["kept_by"] == ["cpu", "ascend", "cuda"]
    assert quantization["excluded"] == [GATES, HEAD]
    assert facts["problems"] == []
    assert facts["total"]["tensor_nbytes"] == data_bytes(folder)
    assert by_name(facts)["experts"][2] == {"I32": 2 * 2 * 4 * 3, "F16": 2 * 4 * 3}
    told = capsys.readouterr().out
    assert "not quantised: model.layers.*.mlp.gate (2 of 2)\n" in told
    assert counted(facts["rank"]) == kept(make_runner(load_case(str(case)), tmp_path).engine.model)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_a_layer_that_predicts_further_tokens_is_named_and_counted(tmp_path: Path, family: str) -> None:
    """Its weights, and a layer more in the cache."""
    folder = tmp_path / "model"
    Oracle(folder, family)
    settings: dict[str, Any] = {"model_name": family, "draft_config": {"method": "mtp"}}
    case = load_case(str(write_case(tmp_path / "tiny.yaml", folder, **settings)))
    rank, plain = inspect_rank(case), inspect_rank(dataclasses.replace(case, draft_config=DraftSettings()))
    model = make_runner(case, tmp_path).engine.model
    sizes = kept(model)[0]
    assert {name: size for name, size in rank["weights"].items() if size and "rotary" not in name} == sizes
    assert sum(sizes.values()) - sizes["MTP layer"] - sizes["experts of the MTP layer"] == sum(
        counted(plain)[0].values()
    )
    of_attention = 1 if family == "qwen3_next" else 2
    assert rank["kv_cache"].startswith(f"{2 * (of_attention + 1)} tensors of ")
    if family == "glm4_moe":  # states of guesses take more pages
        assert rank["kv_cache_nbytes"] * 2 == plain["kv_cache_nbytes"] * 3
    facts = inspect(folder)
    assert facts["problems"] == []
    assert facts["mtp"] == {"held": model.mtp_at, "lacking": ""}
    names = [name for name in load_file(folder / "model.safetensors") if name.startswith(f"{model.mtp_at}.")]
    assert sum(by_name(facts)[name][0] for name in MTP) == len(names)
    damaged(folder, lambda tensors: [tensors.pop(name) for name in names])
    assert inspect(folder)["mtp"] == {"held": "", "lacking": model.mtp_at}


def test_biases_and_what_is_quantised_beside_mxfp4_are_counted(tmp_path: Path) -> None:
    save_tiny_of(tmp_path / "model", "gpt_oss")
    mxfp4_tiny(tmp_path / "model", tmp_path / "mxfp4")
    settings = {"model_name": "gpt_oss", "quantization": {"rest": "q8"}}
    case = load_case(str(write_case(tmp_path / "tiny.yaml", tmp_path / "mxfp4", **settings)))
    rank = inspect_rank(case)
    assert rank["linear_format"] == "mxfp4 in groups of 32, q8 in groups of 32"
    assert counted(rank)[0] == kept(make_runner(case, tmp_path).engine.model)[0]


def damaged(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_flaws_are_part_of_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    save_tiny(folder, tie_word_embeddings=True)
    extra = {"strange\x1b[2J": torch.zeros(2), "lm_head.weight": torch.zeros(96, 32), EXPERT: torch.zeros(16, 31)}
    damaged(folder, lambda t: [t.pop("model.norm.weight"), t.update(extra)])
    execute(["inspect", str(folder)])
    told = capsys.readouterr().out
    assert "problem: 1 tensors missing: model.norm.weight\n" in told
    assert "problem: 1 tensors that the model does not know: 'strange\\x1b[2J'\n" in told
    assert f"problem: 1 tensors that do not fit: {EXPERT} has shape [16, 31], expected [16, 32]\n" in told
    assert "complete" not in told
    facts = inspect(folder)
    assert by_name(facts)["ignored"] == (1, 96 * 32 * 4, {"F32": 1})
    assert by_name(facts)["unknown"] == (1, 8, {"F32": 1})
    assert facts["total"]["tensor_nbytes"] == data_bytes(folder)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["docs"], "docs is no checkpoint: it holds no config.json"),
        (["odd"], "model_type: ['x'] is not supported, only qwen3_moe"),
        (["bare"], "holds neither model.safetensors nor"),
        (["checkpoints/austen_moe", "--set", "method=q4"], "--set method=q4: there is no case to set it in"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    configs = {"odd": '{"model_type": ["x"]}', "bare": (DEMO / "config.json").read_text()}
    folder = ROOT / arguments[0]
    if arguments[0] in configs:
        folder = tmp_path
        (folder / "config.json").write_text(configs[arguments[0]])
    with pytest.raises(UserError) as raised:
        execute(["inspect", str(folder), *arguments[1:]])
    assert complaint in str(raised.value)
