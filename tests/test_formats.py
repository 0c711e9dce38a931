"""Quantised checkpoints: what is read is what the format means, in floats and kept as it is."""

import itertools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models.layers import Experts, MergedLinear, RowLinear, layers_of
from ops.cpu.matrix import NativeExperts, NativeMatrix
from tests.quantised import quantise_tiny
from tests.tiny import make_runner, save_tiny, tiny_case
from tools.logits import prefill_logits

SIZES = dict(
    hidden_size=256, head_dim=32, num_attention_heads=8, num_key_value_heads=4, moe_intermediate_size=128,
    intermediate_size=128, num_experts=4, num_experts_per_tok=2, initializer_range=0.05,
)  # fmt: skip
# format, group, bits, symmetric; whether the CPU keeps it bit for bit
FORMATS = [
    ("awq", 32, 4, False, True),
    ("awq", 64, 4, False, True),
    ("awq", 128, 4, False, True),
    ("gptq", 128, 4, True, True),
    ("gptq", 32, 4, False, True),
    ("gptq", -1, 4, True, True),
    ("gptq_v2", 64, 4, False, True),
    ("gptq", 128, 8, True, True),
    ("gptq", 64, 8, False, False),
    ("pack-quantized", 128, 4, True, True),
    ("pack-quantized", 32, 4, False, True),
    ("pack-quantized", -1, 4, True, True),
    ("pack-quantized", 128, 8, True, True),
    ("pack-quantized", 128, 8, False, False),
    ("int-quantized", -1, 8, True, True),
    ("int-quantized", -1, 8, False, False),
    ("fp8", 0, 8, True, False),
]
IDS = [f"{name}-{bits}bit-g{group}-{'sym' if sym else 'asym'}" for name, group, bits, sym, _ in FORMATS]
PROMPTS = [[5, 17, 3, 88, 2, 41], [7], list(range(30, 53))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float") / "model"
    save_tiny(folder, **SIZES)
    return folder


def logits(folder: Path, checkpoint: Path, **sections: Any) -> list[Tensor]:
    runner = make_runner(tiny_case(folder, checkpoint, **sections), folder)
    return prefill_logits(runner, PROMPTS)


@pytest.mark.parametrize(("format", "group", "bits", "symmetric", "kept"), FORMATS, ids=IDS)
def test_every_format_means_its_floats(
    tmp_path: Path, model: Path, format: str, group: int, bits: int, symmetric: bool, kept: bool
) -> None:
    floats = quantise_tiny(model, tmp_path / "quantised", format, group, bits, symmetric)
    none = {"quantization": {"method": "none"}}
    expected = logits(tmp_path, floats, **none)
    for ours, theirs in zip(logits(tmp_path, tmp_path / "quantised", **none), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    assert_kept(tmp_path / "quantised", load_file(floats / "model.safetensors"), kept)


def assert_kept(checkpoint: Path, means: dict[str, Tensor], kept: bool, **sections: Any) -> None:
    """Every matrix is the checkpoint's, to the last bit, in as many bits as there if `kept`."""
    runner = make_runner(tiny_case(checkpoint.parent, checkpoint, **sections), checkpoint.parent)
    checked = 0
    for path, layer in layers_of(cast(nn.Module, runner.model)):
        if isinstance(layer, Experts):
            native = cast(NativeExperts, layer.weights)
            assert native.w13.format.quantised == kept
            for expert, which in itertools.product(range(layer.experts), ("gate", "up", "down")):
                mean = means[f"{path}.{expert}.{which}_proj.weight"]
                assert torch.equal(native.dequantised(expert, which), mean)
                checked += 1
        elif isinstance(layer, MergedLinear | RowLinear):
            matrix = cast(NativeMatrix, layer.weight)
            parent = path.rpartition(".")[0]
            names = [f"{parent}.{s.name}" for s in layer.sources] if isinstance(layer, MergedLinear) else [path]
            if names == [f"{parent}.gate"]:
                continue
            assert matrix.quantised == kept
            mean = torch.cat([means[f"{name}.weight"] for name in names])
            assert torch.equal(matrix.packed.dequantised(0, matrix.rows), mean)
            checked += 1
    assert checked == 2 * (3 * 4 + 2)
