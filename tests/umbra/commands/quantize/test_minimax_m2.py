"""`umbra quantize` for MiniMax-M2: 4 bits and FP8 in their published layouts, and the folders of the demo."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MiniMaxM2ForCausalLM

from tests.quantised import awq_meaning
from tests.tiny import make_runner, save_tiny_m2
from umbra.base.errors import UserError
from umbra.base.files import ROOT, read_json
from umbra.commands.logits import prefill_logits, sized_for
from umbra.commands.quantize.awq import AwqTarget
from umbra.commands.quantize.convert import Calibration, convert
from umbra.commands.quantize.fp8 import Fp8Target
from umbra.commands.quantize.layer import CalibratedLayer
from umbra.commands.quantize.source import CheckpointSource
from umbra.executor.config.load import load_case
from umbra.models.tokenizers import tokenizer_in

pytestmark = pytest.mark.slow

SIZES = dict(vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8)
SIZES |= dict(num_key_value_heads=4, num_local_experts=6, num_experts_per_tok=2)
TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 6
MOE = "block_sparse_moe"
BIAS = f"{MOE}.e_score_correction_bias"
FLOAT32 = (f"{MOE}.gate.weight", BIAS)


def save_m2(folder: Path, **options: object) -> Path:
    """A tiny model with the official types and the demo's tokenizer."""
    oracle = save_tiny_m2(folder, **(SIZES | options))
    oracle.save_pretrained(folder / "again")
    tensors = load_file(folder / "again/model.safetensors")
    typed = {name: t if name.endswith(FLOAT32) else t.bfloat16() for name, t in tensors.items()}
    save_file(typed, folder / "model.safetensors", metadata={"format": "pt"})
    for path in (folder / "again").iterdir():
        path.unlink()
    (folder / "again").rmdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((ROOT / "checkpoints/austen_moe" / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_m2(tmp_path_factory.mktemp("m2") / "model")


@pytest.fixture
def calibration(tmp_path: Path) -> Calibration:
    (tmp_path / "text.txt").write_text(TEXT)
    return Calibration(tmp_path / "text.txt", 400)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def floats_of(folder: Path) -> dict[str, Tensor]:
    """Returns the floats that the tensors of a quantised folder mean, computed without the project's reader."""
    tensors, floats = tensors_of(folder), {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last == "qweight":
            floats[f"{module}.weight"] = awq_meaning(module, tensors).contiguous()
        elif tensor.dtype == torch.float8_e4m3fn:
            floats[name] = tensor.float() * torch.kron(tensors[f"{module}.weight_scale_inv"], torch.ones(128, 128))
        elif last not in ("qzeros", "scales", "weight_scale_inv"):
            floats[name] = tensor
    return floats


def dequantised(folder: Path) -> Path:
    """The same model as a checkpoint in floats."""
    to = folder.with_name(f"{folder.name}-floats")
    to.mkdir()
    save_file(floats_of(folder), to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (to / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (to / name).write_bytes((folder / name).read_bytes())
    return to


@torch.inference_mode()
def test_the_layers_are_transformers_layers(tmp_path: Path) -> None:
    save_m2(tmp_path, rotary_dim=8)  # of 32 columns
    oracle = MiniMaxM2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    source, ids = CheckpointSource(tmp_path), torch.arange(40).view(2, 20) * 7
    hidden = source.rest()["model.embed_tokens.weight"].float()[ids]
    for index in range(source.config.num_hidden_layers):
        floats = {name: tensor.float() for name, tensor in source.layer(index).items()}
        hidden = CalibratedLayer(source, index, 2, 20).forward(floats.__getitem__, hidden)
    with torch.no_grad():
        expected = oracle.model(ids).last_hidden_state
        torch.testing.assert_close(oracle.model.norm(hidden), expected, atol=1e-4, rtol=1e-4)


def test_an_fp8_source_is_its_floats(tmp_path: Path, model: Path, calibration: Calibration) -> None:
    """The official files are published in FP8 only. What stays in floats is written in bfloat16."""
    convert(tmp_path / "fp8", Fp8Target(CheckpointSource(model), ()))
    floats = dequantised(tmp_path / "fp8")
    for out, source in (("ours", tmp_path / "fp8"), ("theirs", floats)):
        convert(tmp_path / out, AwqTarget(CheckpointSource(source), ("self_attn",), 128), calibration)
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        kept = "self_attn" in name and name.endswith("_proj.weight")
        assert tensor.dtype == (torch.bfloat16 if kept else theirs[name].dtype)
        assert torch.equal(tensor, theirs[name].bfloat16() if kept else theirs[name])
    with pytest.raises(UserError, match=r"is quantised already .FP8 e4m3"):
        convert(tmp_path / "again", Fp8Target(CheckpointSource(tmp_path / "fp8"), ()))
    with pytest.raises(UserError, match=r"is quantised already .AWQ, 4 bits.*: name one in floats or FP8"):
        CheckpointSource(tmp_path / "ours")


def test_what_cannot_be_written_is_one_line(tmp_path: Path, model: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"model_type": "minimax_m3"}))
    with pytest.raises(UserError, match=r"MiniMax-M3, another architecture. is not supported, only"):
        CheckpointSource(tmp_path / "other")
    with pytest.raises(UserError, match=r"--keep model\.layer\.0: is no module of .*, and no part of one's path"):
        convert(tmp_path / "out", Fp8Target(CheckpointSource(model), ("model.layer.0",)))
    save_m2(tmp_path / "odd", intermediate_size=192)
    with pytest.raises(UserError, match=r"experts\.0\.w2\.weight: 192 columns are not a multiple of --group 128"):
        convert(tmp_path / "out", AwqTarget(CheckpointSource(tmp_path / "odd"), (), 128))


CHECKPOINTS = ROOT / "checkpoints"
DEMO, FP8, AWQ = (CHECKPOINTS / f"austen_minimax{ending}" for ending in ("", "_fp8", "_awq"))
HELD_OUT = (CHECKPOINTS / "austen_moe/held_out.txt").read_text()[:6000]


def test_the_fp8_folder_is_what_the_tool_writes(tmp_path: Path) -> None:
    convert(tmp_path / "out", Fp8Target(CheckpointSource(DEMO), ()))
    written = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in written] == sorted(p.name for p in FP8.iterdir() if p.name != "README.md")
    for path in written:
        assert path.read_bytes() == (FP8 / path.name).read_bytes(), path.name


def test_the_awq_folder_was_made_of_the_demo() -> None:
    """From these weights and this text, in QuantTrio's layout; the search is repeated in other tests."""
    source, text = CheckpointSource(DEMO), (CHECKPOINTS / "austen_moe_awq/calibration.txt").read_text()
    assert read_json(AWQ / "quantize_state.json") == {
        "quantization": AwqTarget(source, (), 128).quantisation,
        "source": source.digest(),
        "calibrate": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": 16384,
    }
    assert read_json(AWQ / "config.json")["quantization_config"] == AwqTarget(source, (), 128).quantisation


def log_probabilities(folder: Path, case_name: str) -> Tensor:
    case = load_case(case_name, ["keep_packed=false", "method=auto"])
    ids = tokenizer_in(DEMO).encode(HELD_OUT, chat=False)[:1024]
    rows = [ids[start : start + 256] for start in range(0, len(ids), 256)]
    return torch.cat(prefill_logits(make_runner(sized_for(case, rows, 0), folder), rows)).log_softmax(-1)


def test_the_folders_stay_close_to_the_demo(tmp_path: Path) -> None:
    exact = log_probabilities(tmp_path, "demo_minimax")
    for case, most in (("demo_minimax_fp8", 0.01), ("demo_minimax_awq", 0.05)):
        ours = log_probabilities(tmp_path, case)
        assert 0 < float((exact.exp() * (exact - ours)).sum(-1).mean()) < most
