"""The benchmarks run, write the rows they document, and give llama.cpp exactly the numbers that the engine holds."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from benchmarks import compare_llama_cpp, cpu_decode
from benchmarks.gguf_file import TYPES, encoded, entries, write_gguf
from benchmarks.umbra import Umbra
from errors import UserError
from ops.cpu.matrix import NativeExperts, NativeMatrix
from ops.format import FORMATS
from tests.tiny import save_tiny, write_case

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A case with sizes that can be quantised, and positions for the longest prompt."""
    folder = tmp_path_factory.mktemp("benchmarks")
    save_tiny(folder / "model", moe_intermediate_size=32, max_position_embeddings=4096)
    return str(write_case(folder / "tiny.yaml", folder / "model", model_config={"dtype": "bfloat16"}))


@pytest.mark.parametrize("format", ["q4", "q8"])
def test_blocks_hold_exactly_the_engines_values(format: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(300, 96) * torch.logspace(-3, 2, 300)[:, None]
    values[5, 32:64] = 0
    values[6, :32] = 1.0  # many elements as large as the largest, of both signs
    values[6, :16] = -1.0
    matrix = NativeMatrix(300, 96, FORMATS[format], CPU)
    matrix.fill(0, values)
    experts = NativeExperts(2, 32, 96, FORMATS[format], CPU)
    experts.fill(1, "up", values[:32])
    experts.fill(1, "down", values[:96, :32])
    for kept in (matrix.packed.dequantised(0, 300), experts.dequantised(1, "up"), experts.dequantised(1, "down")):
        read = dequantize(encoded(kept, format), GGMLQuantizationType[TYPES[format]])
        assert kept.abs().max() > 0
        np.testing.assert_array_equal(read, kept.numpy())


def test_other_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="not those of a q4 matrix"):
        encoded(torch.linspace(-1, 1, 32)[None], "q4")


@pytest.mark.parametrize("format", ["q4", "q8"])
def test_gguf_file_has_every_weight(case: str, tmp_path: Path, format: str) -> None:
    engine = Umbra(case, None, format, 1, "auto", 1, 16)
    write_gguf(tmp_path / "tiny.gguf", engine.model, engine.config, format)
    tensors = {t.name: t for t in GGUFReader(tmp_path / "tiny.gguf").tensors}
    for entry in entries(engine.model, engine.config, format):
        tensor = tensors.pop(entry.name)
        assert tuple(reversed(tensor.shape.tolist())) == entry.shape
        assert tensor.tensor_type.name == TYPES["q8" if entry.name == "output.weight" else entry.format]
        kept = torch.cat(list(entry.read())).reshape(entry.shape).float().numpy()
        np.testing.assert_array_equal(dequantize(tensor.data, tensor.tensor_type).reshape(entry.shape), kept)
    assert not tensors
    assert sum(int(np.prod(e.shape)) for e in entries(engine.model, engine.config, format)) == sum(
        p.kept_elements for path, layer in cpu_decode.layers_of(engine.model) for p in layer.pieces(path)
    )


def test_cpu_decode_writes_its_rows(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]
    cpu_decode.main(["--case", case, "--layers", "1", "--context", "8", "--seconds", "0", "--threads", "1", *outputs])
    data = json.loads((tmp_path / "rows.json").read_text())
    assert data["layers"] == 1
    assert data["format"] == "q4"
    rows = data["rows"]
    assert [(r["phase"], r["batch"]) for r in rows] == [("decode", b) for b in (1, 4, 8)] + [
        ("prefill", n) for n in (128, 512, 2048)
    ]
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert 0 < row["read_fraction"] < 1
        assert 0 < row["int8_fraction"] < 1
    experts = [r["experts"] for r in rows]
    assert experts[0] == 3  # of one token
    assert 3 < experts[1] <= experts[2] <= 8  # tokens of their own reach other experts
    assert (tmp_path / "rows.png").stat().st_size > 0
    assert capsys.readouterr().out.count("prefill") == 3


def test_decode_steps_repeat_one_position(case: str) -> None:
    """Any number of steps later, the logits are those of a prefill of context and token."""
    engine = Umbra(case, 2, "q8", 1, "auto", 2, 16)
    contexts = engine.random_prompts(2, 9, torch.Generator().manual_seed(0))
    expected = [engine.prefill([*context, 5]) for context in contexts]
    engine.begin(contexts)
    for token in (1, 2, 3):
        engine.step([token, token])
    logits = engine.step([5, 5])
    assert (logits - torch.cat(expected)).norm() < 0.02 * logits.norm()


def test_different_logits_end_the_comparison() -> None:
    a = torch.randn(10, 1000)
    found = compare_llama_cpp.checked((a, a * 1.01), (a, a))
    assert found["prefill_median_error"] == pytest.approx(0.01, rel=1e-3)
    assert found["same_top"] == 1
    for wrong in (a.flip(1), a * 1.2, a * float("nan")):
        with pytest.raises(UserError, match="the logits differ"):
            compare_llama_cpp.checked((a, a), (a, wrong))


def test_without_llama_cpp_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UserError, match=r"pip install -r requirements-compare\.txt"):
        compare_llama_cpp.main(["--layers", "1"])
