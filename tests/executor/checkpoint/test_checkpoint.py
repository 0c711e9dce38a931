"""Loading proves completeness: a missing, extra, misshapen or damaged tensor is named, and nothing is loaded."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_runner, oracle_logits, save_tiny, tiny_case
from umbra.commands.logits import collect_logits
from umbra.errors import UserError

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def resave(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def load_error(tmp_path: Path) -> str:
    with pytest.raises(UserError) as raised:
        make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


CHANGES: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: [t.pop(EXPERT), t.pop("model.norm.weight")], f"2 tensors missing: {EXPERT}, model.norm.weight"),
    (lambda t: t.update({"model.layers.9.x": torch.zeros(2)}), "that the model does not know: model.layers.9.x"),
    (lambda t: t.update({EXPERT: torch.zeros(16, 31)}), f"{EXPERT} has shape [16, 31], expected [16, 32]"),
    (lambda t: t.update({EXPERT: torch.zeros(16, 32, dtype=torch.int8)}), f"{EXPERT} has type I8, expected one of"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "complaint"), CHANGES)
def test_what_is_missing_or_unknown_or_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[Tensors], object], complaint: str
) -> None:
    save_tiny(tmp_path / "model")
    resave(tmp_path / "model", change)
    assert complaint in load_error(tmp_path)


def test_rotary_frequencies_of_older_tools_are_ignored(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    resave(tmp_path / "model", lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)


def test_values_that_are_not_finite_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "model", tie_word_embeddings=True)
    make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)
    assert "warning" not in capsys.readouterr().out
    resave(
        tmp_path / "model",
        lambda t: [t[EXPERT][3].fill_(math.nan), t["model.embed_tokens.weight"][:, 1].fill_(math.inf)],
    )
    make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1
    assert "model: 2 tensors hold NaN or infinite values: " in lines[0]
    assert EXPERT in lines[0]
    assert "model.embed_tokens.weight" in lines[0]


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        (
            {"hidden_size": 1 << 23},
            r"GB of weights, .* GB of KV cache and .* on each of 1 rank\(s\) do not fit into the",
        ),
        ({"num_experts": 1 << 16, "moe_intermediate_size": 1 << 20}, "do not fit into the"),
        ({"num_experts": 10**7}, "num_experts: 10000000 must be an integer from 0 to 65536"),
    ],
)
def test_random_weights_of_absurd_sizes_are_refused_by_count(
    tmp_path: Path, size: dict[str, int], complaint: str
) -> None:
    save_tiny(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | size))
    case = tiny_case(tmp_path, tmp_path / "model", model_config={"dtype": "float32", "with_ckpt": False})
    with pytest.raises(UserError, match=complaint):
        make_runner(case, tmp_path)


def test_sharded_checkpoint_loads(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    arrays = collect_logits(make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path), [[3, 4, 5]], steps=0)
    np.testing.assert_allclose(arrays["prefill_0"], oracle_logits(oracle, [3, 4, 5]).numpy(), atol=1e-4)


def test_index_that_misplaces_a_tensor_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", max_shard_size="20KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    files = sorted(set(data["weight_map"].values()))
    place = data["weight_map"]["model.norm.weight"]
    data["weight_map"]["model.norm.weight"] = next(f for f in files if f != place)
    index.write_text(json.dumps(data))
    assert "not in the file the index names: model.norm.weight" in load_error(tmp_path)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", max_shard_size="20KB")
    paths = sorted((tmp_path / "model").glob("*.safetensors"))
    save_file(load_file(paths[0]) | load_file(paths[1]), paths[0])
    assert "is also in" in load_error(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor model.safetensors.index.json" in load_error(tmp_path)


def test_tied_head_that_was_saved_all_the_same_is_ignored(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path / "model", tie_word_embeddings=True)
    resave(tmp_path / "model", lambda t: t.update({"lm_head.weight": torch.zeros(96, 32)}))
    arrays = collect_logits(make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path), [[3, 4, 5]], steps=0)
    np.testing.assert_allclose(arrays["prefill_0"], oracle_logits(oracle, [3, 4, 5]).numpy(), atol=1e-4)
