"""The parts of a conversion, with sources that are made up: windows of text, folders, search for scales, and folds."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from umbra.commands.quantize import convert as module
from umbra.commands.quantize import search
from umbra.commands.quantize.awq import AwqTarget
from umbra.commands.quantize.convert import STATE, Calibration, _begin, _finish, _read_text, _token_ids, _written
from umbra.commands.quantize.fp8 import Fp8Target
from umbra.commands.quantize.search import Fold, best_scale, fold
from umbra.errors import UserError


@pytest.mark.parametrize(
    ("tokens", "positions", "most", "windows"),
    [
        (7, 3, 99, [[0, 1, 2], [3, 4, 5]]),
        (7, 9, 4, [[0, 1, 2, 3]]),
        (7, 9, 99, [[0, 1, 2, 3, 4, 5, 6]]),
        (6, 2, 5, [[0, 1], [2, 3]]),
        (2, 9, 99, [[0, 1]]),
    ],
)
def test_a_calibration_text_in_windows(
    monkeypatch: pytest.MonkeyPatch, tokens: int, positions: int, most: int, windows: list[list[int]]
) -> None:
    asked: Any = []
    encode: Any = lambda text, chat: (asked.append((text, chat)), list(range(tokens)))[1]  # noqa: E731
    monkeypatch.setattr(module, "Tokenizer", lambda folder: SimpleNamespace(encode=encode))
    config = SimpleNamespace(vocab_size=tokens, max_positions=positions)
    source: Any = SimpleNamespace(folder="folder", config=config)
    assert _token_ids(source, "text", Calibration(Path("t"), most)).tolist() == windows
    assert asked == [("text", False)]
    monkeypatch.setattr(module, "WINDOW", 2)
    assert _token_ids(source, "text", Calibration(Path("t"), most)).shape[1] == 2
    config.vocab_size = min(tokens, most) - 1
    with pytest.raises(UserError, match=rf"^folder: its tokenizer gives {config.vocab_size}, outside vocab_size"):
        _token_ids(source, "text", Calibration(Path("t"), most))
    with pytest.raises(UserError, match=r"^--calibrate t: fewer than two tokens$"):
        _token_ids(source, "text", Calibration(Path("t"), 1))


def test_a_text_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("é", encoding="utf-8")
    assert _read_text(tmp_path / "text") == "é"
    (tmp_path / "text").write_bytes(b"\xff")
    for path in (tmp_path / "text", tmp_path / "none"):
        with pytest.raises(UserError, match=rf"^--calibrate {path}: not readable: "):
            _read_text(path)


def test_a_folder_goes_on_with_the_same_state(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    _begin(out, {"x": 1, "y": 2})
    assert json.loads((out / STATE).read_text()) == {"x": 1, "y": 2}
    _begin(out, {"x": 1, "y": 2})
    with pytest.raises(UserError, match=r"out: was begun with another x, y, z: use the same, or remove it$"):
        _begin(out, {"x": 2, "z": 1})
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{STATE}.tmp").touch()
    _begin(other, {})
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    with pytest.raises(UserError, match=rf"full: holds files, but no {STATE}: give a new folder$"):
        _begin(full, {})
    with pytest.raises(UserError, match=r"file: cannot be created: "):
        _begin(full / "file", {})


def test_tensors_of_a_layer_are_quantised_or_keep_their_type() -> None:
    layer = {"a.weight": torch.ones(2, 4), "b.weight": torch.ones(4), "a.bias": torch.full((2,), 3.0)}
    target: Any = SimpleNamespace(
        source=SimpleNamespace(layer=lambda index: layer, float_type=lambda name: torch.float16),
        quantised=lambda name: name == "model.layers.7.a",
        tensors=lambda name, tensor: {f"{name}.q": tensor + 1, f"{name}.s": tensor},
    )
    scale = torch.tensor([1.0, 2.0, 4.0, 8.0])
    found = dict(_written(target, 7, [Fold(scale, frozenset(["a.weight"]), frozenset(["b.weight"]))]))
    assert list(found) == [
        "model.layers.7.a.q", "model.layers.7.a.s", "model.layers.7.b.weight", "model.layers.7.a.bias",
    ]  # fmt: skip
    assert found["model.layers.7.a.q"].tolist() == [[2, 3, 5, 9]] * 2
    assert found["model.layers.7.b.weight"].tolist() == [1, 0.5, 0.25, 0.125]
    assert found["model.layers.7.b.weight"].dtype == torch.float16


def test_the_index_and_the_config_make_a_checkpoint(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text('{"a": 1, "quantization_config": {"old": 1}}')
    out.mkdir()
    (out / STATE).write_text("{}")
    (out / STATE).chmod(0o640)
    paths = [out / "one.safetensors", out / "two.safetensors"]
    module._write_tensors(paths[0], {"z": torch.ones(3), "b": torch.ones(1)})
    module._write_tensors(paths[1], {"a": torch.ones(2)})
    assert paths[0].stat().st_mode & 0o777 == 0o640
    target: Any = SimpleNamespace(source=SimpleNamespace(folder=source), quantisation={"bits": 4})
    _finish(target, out, paths)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    size = sum(path.stat().st_size for path in paths)
    assert index == {
        "metadata": {"total_size": size},
        "weight_map": {"a": "two.safetensors", "b": "one.safetensors", "z": "one.safetensors"},
    }
    assert list(index["weight_map"]) == ["a", "b", "z"]
    assert json.loads((out / "config.json").read_text()) == {"a": 1, "quantization_config": {"bits": 4}}
    module._copy(paths[0], out / "copy")
    assert (out / "copy").read_bytes() == paths[0].read_bytes()
    with pytest.raises(UserError, match=r"none/x: cannot be written: "):
        module._write_tensors(tmp_path / "none" / "x", {"a": torch.ones(1)})


def test_the_scale_that_changes_an_output_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all exponents the one is taken whose rounding is made the best here."""
    x = torch.tensor([[4.0, 1.0, 0.0], [-4.0, 1.0, 0.0]])
    size = torch.tensor([4.0, 1.0, 0.01 * 5 / 3])
    tried: list[torch.Tensor] = []

    def rounded(weights: Any, names: Any, scale: torch.Tensor, group: int) -> Any:
        assert (weights, names, group) == ("weights", {"w"}, 32)
        tried.append(scale)
        return scale

    def part(of: Any) -> torch.Tensor:
        if isinstance(of, str):
            return torch.zeros(1)
        return torch.tensor([abs(len(tried) - 6.0)])

    monkeypatch.setattr(search, "_rounded", rounded)
    weights: Any = "weights"
    found = best_scale(x, frozenset(["w"]), weights, part, 32)
    assert len(tried) == 20
    assert found is tried[5]
    wanted = size ** (5 / 20)
    assert torch.allclose(found, wanted / (wanted.max() * wanted.min()).sqrt())
    assert torch.equal(tried[0], torch.ones(3))
    tried.clear()
    nothing = best_scale(torch.zeros(2, 3), frozenset(["w"]), weights, lambda of: torch.tensor([float("nan")]), 32)
    assert nothing.tolist() == [1, 1, 1]


def test_only_named_weights_are_rounded() -> None:
    weights = {"a": torch.tensor([[0.1, 0.9]]), "b": torch.tensor([[0.1, 0.9]])}
    scale = torch.tensor([2.0, 0.5])
    found = search._rounded(weights.__getitem__, frozenset(["a"]), scale, 2)
    assert found("b") is weights["b"]
    exact = search.quantise(weights["a"] * scale, 2).floats() / scale
    assert torch.equal(found("a"), exact)
    assert not torch.equal(found("a"), weights["a"])
    assert float(search._product(torch.ones(1, 2), "a", weights.__getitem__)) == pytest.approx(1.0)


def test_folds_are_exact_where_a_norm_is_rounded() -> None:
    norm = torch.tensor([1.0, 1.0, 0.0], dtype=torch.bfloat16)
    tensors = {"in.norm.weight": norm, "w": torch.ones(2, 3), "v": torch.ones(3, 2), "v.bias": torch.ones(3)}
    scale = torch.tensor([3.0, 2.0, 5.0])
    found = dict(fold(tensors, [Fold(scale, frozenset(["w"]), frozenset(["in.norm.weight"]))]))
    third = float(torch.tensor(1 / 3).bfloat16())
    assert found["w"].tolist() == [[pytest.approx(1 / third), 2.0, 5.0]] * 2
    assert found["in.norm.weight"].tolist() == pytest.approx([third, 0.5, 0.0])
    assert found["w"].dtype == torch.float32
    rows = dict(fold(tensors, [Fold(scale, frozenset(), frozenset(["v", "v.bias"]))]))
    assert rows["v"].tolist() == [[pytest.approx(1 / s)] * 2 for s in (3, 2, 5)]
    assert rows["v.bias"].tolist() == pytest.approx([1 / 3, 1 / 2, 1 / 5])


def test_sizes_that_formats_cannot_store() -> None:
    source: Any = SimpleNamespace(
        family=SimpleNamespace(router="gate", fp8_name="e4m3", not_fp8=lambda config: ["head", config]), config="c"
    )
    awq, fp8 = AwqTarget(source, ("kept",), 32), Fp8Target(source, ("kept",))
    assert [awq.check_sizes(*size) for size in ((8, 32), (16, 64))] == ["", ""]
    assert awq.check_sizes(8, 33) == "33 columns are not a multiple of --group 32: choose another"
    assert awq.check_sizes(9, 32) == "9 rows are not a multiple of 8, as this format needs"
    assert fp8.check_sizes(128, 256) == ""
    for size in ((127, 128), (128, 129)):
        assert fp8.check_sizes(*size) == f"{size[0]} x {size[1]} weights are no whole blocks of 128 x 128"
    assert awq.quantisation == {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True,
        "modules_to_not_convert": ["gate", "kept"],
    }  # fmt: skip
    assert fp8.quantisation == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["head", "c", "kept"],
    }  # fmt: skip
