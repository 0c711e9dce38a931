"""Quantised weights kept on disk: used if nothing has changed, replaced if anything has, never incomplete."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.gguf_models import mostly_q4_k, save_gguf
from tests.quantised import mxfp4_tiny
from tests.tiny import ONE_RANK, save_tiny, save_tiny_of, tiny_case
from umbra.commands.logits import collect_logits
from umbra.executor.checkpoint.packed import PackedCache
from umbra.executor.config.case import Case
from umbra.executor.model_runner import make_runner
from umbra.models.gguf import folder as unpacked
from umbra.models.layers.base import layers_of
from umbra.models.layers.experts import Experts

IDS = [[5, 17, 3], list(range(30, 53))]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    save_tiny(tmp_path / "model", moe_intermediate_size=32, attention_bias=True)
    return case_of(tmp_path)


@pytest.fixture(params=["q4", "mxfp4", "gguf"])
def either(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """All is quantised here, or experts are as in the checkpoint and the rest is quantised here, or nothing is."""
    if request.param == "gguf":
        monkeypatch.setattr(unpacked, "FOLDERS", tmp_path / "unpacked")
        save_tiny(tmp_path / "model", hidden_size=256, head_dim=32, num_attention_heads=8, moe_intermediate_size=256)
        save_gguf(tmp_path / "model", tmp_path / "model.gguf", "qwen3_moe", mostly_q4_k)
        return tiny_case(tmp_path, tmp_path / "model.gguf", quantization={"keep_packed": True})
    if request.param == "q4":
        quantised: Case = request.getfixturevalue("case")
        return quantised
    save_tiny_of(tmp_path / "float", "gpt_oss")
    mxfp4_tiny(tmp_path / "float", tmp_path / "model")
    settings = {"rest": "q8", "keep_packed": True}
    return tiny_case(tmp_path, tmp_path / "model", model_name="gpt_oss", quantization=settings)


def case_of(folder: Path, **quantization: object) -> Case:
    settings = {"method": "q4", "keep_packed": True} | quantization
    return tiny_case(folder, folder / "model", quantization=settings)


def start(case: Case, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, np.ndarray]]:
    """(what was printed about the packed weights, logits)"""
    capsys.readouterr()
    runner = make_runner(case, folder, ONE_RANK)
    runner.packed_cache = partial(PackedCache, root=folder / "kept")
    runner.setup()
    arrays = collect_logits(runner, IDS, steps=2)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("packed weights:")]
    return "; ".join(said), arrays


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def test_second_start_takes_what_the_first_kept(
    either: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, first = start(either, tmp_path, capsys)
    assert said.startswith("packed weights: none cached yet, packing now; packed weights: kept in ")
    (folder,) = (tmp_path / "kept").iterdir()
    said, second = start(either, tmp_path, capsys)
    assert said == f"packed weights: mapped from {folder}"
    assert_equal(first, second)


def test_weights_that_will_be_written_are_read(
    either: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that writes to a mapped file ends."""
    _, first = start(either, tmp_path, capsys)
    runner = make_runner(either, tmp_path, ONE_RANK)

    def read_only(facts: dict[str, object], folder: Path, rank: int, model: nn.Module, mapped: bool) -> PackedCache:
        return PackedCache(facts, folder, rank, model, mapped=False, root=tmp_path / "kept")

    runner.packed_cache = read_only
    runner.setup()
    assert "packed weights: read from " in capsys.readouterr().out
    experts: Any = next(layer.weights for _, layer in layers_of(runner.engine.model) if isinstance(layer, Experts))
    experts.restore([0], experts.stored([0]))
    assert_equal(first, collect_logits(runner, IDS, steps=2))


def test_whatever_changed_is_made_anew_and_named(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, first = start(case, tmp_path, capsys)
    (folder,) = (tmp_path / "kept").iterdir()
    os.utime(tmp_path / "model" / "model.safetensors", ns=(1, 1))
    assert start(case, tmp_path, capsys)[0].startswith("packed weights: changed: sources, packing now; ")
    assert "mapped from" in start(case, tmp_path, capsys)[0]  # the new one has replaced the old
    for name in ("lm_head.0.bin", "small.bin"):
        path = folder / name
        size = path.stat().st_size
        path.write_bytes(path.read_bytes()[:-10])
        said, again = start(case, tmp_path, capsys)
        assert f"unreadable: {name} has {size - 10} bytes, expected {size}, packing now" in said
        assert_equal(first, again)
    path.unlink()
    assert "packed weights: unreadable: " in start(case, tmp_path, capsys)[0]
    (folder / "manifest.json").write_text("{")
    assert "packed weights: manifest.json unreadable: " in start(case, tmp_path, capsys)[0]
    assert list((tmp_path / "kept").iterdir()) == [folder]
    other = case_of(tmp_path, zero_points=True)
    assert start(other, tmp_path, capsys)[0].startswith("packed weights: none cached yet, packing now; ")
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_a_changed_gguf_file_is_packed_anew(either: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not either.model_path.endswith(".gguf"):
        pytest.skip("no GGUF file")
    start(either, tmp_path, capsys)
    os.utime(tmp_path / "model.gguf", ns=(1, 1))
    assert start(either, tmp_path, capsys)[0].startswith("packed weights: changed: sources, packing now; ")


def test_what_others_put_there_stays(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(case, tmp_path, capsys)
    (folder,) = (tmp_path / "kept").iterdir()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    killed = folder.with_name(f"{folder.name}.{2**22 + 1}.tmp")  # above every process number
    killed.mkdir()
    said, _ = start(case, tmp_path, capsys)
    assert said.startswith("packed weights: none cached yet, packing now; packed weights: not kept in")
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]
    assert list((tmp_path / "kept").iterdir()) == [folder]  # and the files of a killed writer are removed
