"""`umbra quantize` for MiniMax-M2: 4 bits and FP8 in their published layouts, from floats and from FP8."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MiniMaxM2ForCausalLM

from executor.checkpoint.formats.detect import read_scheme
from tests.quantised import awq_meaning
from tests.tiny import make_runner, save_tiny, save_tiny_m2, tiny_case
from umbra.commands.logits import prefill_logits
from umbra.commands.quantize.awq import AwqTarget
from umbra.commands.quantize.convert import Calibration, convert
from umbra.commands.quantize.fp8 import Fp8Target
from umbra.commands.quantize.source import Source
from umbra.errors import UserError
from umbra.files import ROOT

pytestmark = pytest.mark.slow

SIZES = dict(
    vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, num_local_experts=6, num_experts_per_tok=2,
)  # fmt: skip
TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 6
PROMPTS = [[5, 17, 3, 88, 2, 41], [7], list(range(130, 153))]
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


def quantisation_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def floats_of(folder: Path) -> dict[str, Tensor]:
    """What the tensors of a quantised folder mean, computed without the project's reader."""
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


def logits(folder: Path, checkpoint: Path) -> Tensor:
    case = tiny_case(folder, checkpoint, model_name="minimax_m2", quantization={"method": "none"})
    return torch.cat(prefill_logits(make_runner(case, folder), PROMPTS))


def test_the_layers_in_parts_are_transformers_layers(tmp_path: Path) -> None:
    for folder, rotary in ((tmp_path / "half", 16), (tmp_path / "quarter", 8)):  # of 32 columns
        save_m2(folder, rotary_dim=rotary)
        oracle = MiniMaxM2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        source, ids = Source(folder), torch.arange(40).view(2, 20) * 7
        hidden = source.rest()["model.embed_tokens.weight"].float()[ids]
        for index in range(source.config.num_hidden_layers):
            floats = {name: tensor.float() for name, tensor in source.layer(index).items()}
            hidden = source.math(index, 20).forward(floats.__getitem__, hidden)
        with torch.no_grad():
            expected = oracle.model(ids).last_hidden_state
            torch.testing.assert_close(oracle.model.norm(hidden), expected, atol=1e-4, rtol=1e-4)


def test_fp8_has_the_official_layout(tmp_path: Path) -> None:
    """Of Qwen3-MoE; that of MiniMax-M2 is in the demo's folder, byte by byte."""
    save_tiny(tmp_path / "model", hidden_size=128, head_dim=32, num_key_value_heads=4, moe_intermediate_size=128)
    inside = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    excluded = ["lm_head", *(f"model.layers.{i}.{name}" for i in range(2) for name in inside)]
    convert(tmp_path / "out", Fp8Target(Source(tmp_path / "model"), ()))
    assert quantisation_of(tmp_path / "out") == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": excluded,
    }  # fmt: skip
    before, after, floats = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "out"), floats_of(tmp_path / "out")
    scheme, source = read_scheme(tmp_path / "out"), Source(tmp_path / "out")  # the project's reader
    linear = {n for n in before if n.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))}
    assert after.keys() == before.keys() | {f"{name}_scale_inv" for name in linear}
    for name, weight in before.items():
        assert torch.equal(source.read(name), floats[name])
        if name not in linear:
            assert torch.equal(after[name], weight)
            continue
        assert scheme.encoding(name.removesuffix(".weight"))
        scales = after[f"{name}_scale_inv"]
        assert (after[name].dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert scales.shape == (weight.shape[0] // 128, weight.shape[1] // 128)
        bound = torch.maximum(weight.float().abs() / 16, torch.kron(scales, torch.ones(128, 128)) / 1024)
        assert ((floats[name] - weight.float()).abs() <= bound * (1 + 1e-6)).all()


def test_an_fp8_source_is_its_floats(tmp_path: Path, model: Path, calibration: Calibration) -> None:
    """The official files are published in FP8 only. What stays in floats is written in bfloat16."""
    convert(tmp_path / "fp8", Fp8Target(Source(model), ()))
    floats = dequantised(tmp_path / "fp8")
    for out, source in (("ours", tmp_path / "fp8"), ("theirs", floats)):
        convert(tmp_path / out, AwqTarget(Source(source), ("self_attn",), 128), calibration)
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        kept = "self_attn" in name and name.endswith("_proj.weight")
        assert tensor.dtype == (torch.bfloat16 if kept else theirs[name].dtype)
        assert torch.equal(tensor, theirs[name].bfloat16() if kept else theirs[name])
    with pytest.raises(UserError, match=r"is quantised already .FP8 e4m3"):
        convert(tmp_path / "again", Fp8Target(Source(tmp_path / "fp8"), ()))
    with pytest.raises(UserError, match=r"is quantised already .AWQ, 4 bits.*: name one in floats or FP8"):
        Source(tmp_path / "ours")


def test_what_cannot_be_written_is_one_line(tmp_path: Path, model: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"model_type": "minimax_m3"}))
    with pytest.raises(UserError, match=r"MiniMax-M3, another architecture. is not supported, only"):
        Source(tmp_path / "other")
    with pytest.raises(UserError, match=r"--keep model\.layer\.0: is no module of .*, and no part of one's path"):
        convert(tmp_path / "out", Fp8Target(Source(model), ("model.layer.0",)))
    save_m2(tmp_path / "odd", intermediate_size=192)
    with pytest.raises(UserError, match=r"experts\.0\.w1\.weight: 192 x 128 weights are no whole blocks of 128 x 128"):
        convert(tmp_path / "out", Fp8Target(Source(tmp_path / "odd"), ()))
    with pytest.raises(UserError, match=r"experts\.0\.w2\.weight: 192 columns are not a multiple of --group 128"):
        convert(tmp_path / "out", AwqTarget(Source(tmp_path / "odd"), (), 128))
    convert(tmp_path / "out", Fp8Target(Source(tmp_path / "odd"), ("experts",)))  # attention alone can be
