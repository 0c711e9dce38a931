"""Loading proves completeness: a missing, extra, misshapen or damaged tensor is named, and nothing is loaded."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.checkpoint import load
from executor.checkpoint.random import random_weights
from models.layers.base import ALL, Layer, Piece
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


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    resave(tmp_path / "model", lambda t: [t.pop(EXPERT), t.pop("model.norm.weight")])
    assert f"2 tensors missing: {EXPERT}, model.norm.weight" in load_error(tmp_path)


def test_extra_tensors_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    resave(tmp_path / "model", lambda t: t.update({"model.layers.9.surprise": torch.zeros(2)}))
    assert "1 tensors that the model does not know: model.layers.9.surprise" in load_error(tmp_path)


def test_rotary_frequencies_of_older_tools_are_ignored(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    resave(tmp_path / "model", lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named_once(
    tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "model", tie_word_embeddings=True)
    make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)
    assert "warning" not in capsys.readouterr().out
    resave(tmp_path / "model", lambda t: [t[EXPERT][3].fill_(value), t["model.embed_tokens.weight"][:, 1].fill_(value)])
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
        ({"moe_intermediate_size": 1 << 24}, "do not fit into the"),
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


@pytest.mark.parametrize("tied", [False, True])
def test_the_bar_counts_the_bytes_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    """Also where two layers are filled from one tensor."""
    bars: list[tuple[int, int]] = []

    class Bar:
        def __init__(self, total: int, shown: bool):
            self.n, self.total = 0, total

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *raised: object) -> None:
            bars.append((self.total, self.n))

        def update(self, count: int) -> None:
            self.n += count

    monkeypatch.setattr(load, "loading_bar", Bar)
    save_tiny(tmp_path / "model", tie_word_embeddings=tied)
    make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)
    ((total, done),) = bars
    size = sum(t.nbytes for t in load_file(tmp_path / "model" / "model.safetensors").values())
    assert total == done == size + tied * 96 * 32 * 4


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    resave(tmp_path / "model", lambda t: t.update({EXPERT: torch.zeros(16, 31)}))
    assert f"1 tensors that do not fit: {EXPERT} has shape [16, 31], expected [16, 32]" in load_error(tmp_path)


def test_wrong_types_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    resave(tmp_path / "model", lambda t: t.update({EXPERT: torch.zeros(16, 32, dtype=torch.int8)}))
    assert f"{EXPERT} has type I8, expected one of BF16, F16, F32" in load_error(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_files_are_named(tmp_path: Path, size: int) -> None:
    save_tiny(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:size])
    assert "model.safetensors: truncated or corrupt" in load_error(tmp_path)


def test_header_of_terabytes_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes((1 << 42).to_bytes(8, "little") + path.read_bytes()[8:])
    assert "model.safetensors: truncated or corrupt" in load_error(tmp_path)


def test_sharded_checkpoint_loads(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    arrays = collect_logits(make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path), [[3, 4, 5]], steps=0)
    np.testing.assert_allclose(arrays["prefill_0"], oracle_logits(oracle, [3, 4, 5]).numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("file_name", "complaint"),
    [
        ("../model.safetensors", "'../model.safetensors' is not the name of a .safetensors file in the same folder"),
        ("/etc/passwd", "'/etc/passwd' is not the name"),
        ("other.bin", "'other.bin' is not the name"),
        ("absent.safetensors", "absent.safetensors does not exist, but the checkpoint's index names it"),
    ],
)
def test_index_may_only_name_files_beside_it(tmp_path: Path, file_name: str, complaint: str) -> None:
    save_tiny(tmp_path / "model", max_shard_size="20KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.norm.weight"] = file_name
    index.write_text(json.dumps(data))
    assert complaint in load_error(tmp_path)


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


def test_random_weights_need_no_checkpoint_and_differ_everywhere(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    case = tiny_case(tmp_path, tmp_path / "model", model_config={"dtype": "float32", "with_ckpt": False})
    runner = make_runner(case, tmp_path)
    rows = [runner.engine.model.lm_head.weight.packed.dequantised(0, 96)]
    for layer in runner.engine.model.model.layers:
        experts = layer.mlp.experts.weights
        rows += [experts.dequantised(e, which)[:16] for e in range(experts.count) for which in ("gate", "up")]
        rows.append(layer.self_attn.qkv_proj.weight.packed.dequantised(0, 96))
    together = torch.cat(rows)
    assert len(together.unique(dim=0)) == len(together)
    assert abs(float(together.mean())) < 1e-3


class Shapes(Layer):
    """A layer of one piece for each of `shapes`, which keeps what it is filled with."""

    def __init__(self, *shapes: tuple[int, ...]):
        super().__init__()
        self.shapes, self.filled = shapes, dict[str, torch.Tensor]()

    def pieces(self, path: str) -> Iterator[Piece]:
        for number, shape in enumerate(self.shapes):
            name = str(number)
            yield Piece(name, shape, (ALL,) * len(shape), lambda part, name=name: self.filled.update({name: part}))


def test_random_weights_fill_the_largest_first_and_make_vectors_near_one() -> None:
    layer = Shapes((64,), (8, 16), (32, 64))
    random_weights(torch.nn.Sequential(layer), seed=0)
    assert list(layer.filled) == ["2", "1", "0"]  # before the memory of all the others is taken
    assert len(layer.filled["0"].unique()) > 60
    assert (layer.filled["0"] - 1).abs().max() < 0.1
    assert abs(float(layer.filled["2"].mean())) < 0.01
