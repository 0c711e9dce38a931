"""GGUF files as checkpoints: the same logits as the model that they were written from, and what is refused."""

import itertools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from executor.checkpoint.formats.detect import read_scheme
from executor.checkpoint.load import load_checkpoint
from executor.config.load import load_model_config, model_folder
from executor.engine.weight_formats import build_of
from models.gguf import folder as unpacked
from models.gguf.types import BY_NAME
from models.layers.base import layers_of
from models.layers.experts import Experts
from models.layers.linear import MergedLinear, RowLinear
from models.registry import model_class
from ops import load_ops
from ops.cpu import engine
from ops.cpu.matrix import NativeExperts
from ops.parallel.join import parallel_of
from tests.gguf_models import save_gguf
from tests.tiny import TINY_OF, make_runner, save_tiny, save_tiny_m2, save_tiny_of, tiny_case
from umbra.commands.logits import prefill_logits

SIZES: dict[str, Any] = dict(
    hidden_size=256, head_dim=32, num_attention_heads=8, num_key_value_heads=4, moe_intermediate_size=256,
    intermediate_size=256, num_hidden_layers=2, initializer_range=0.05,
)  # fmt: skip
PROMPTS = [[5, 17, 3, 88, 2, 41], [7], list(range(30, 53))]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked, "FOLDERS", tmp_path / "unpacked")


def save(folder: Path, family: str, **options: Any) -> None:
    if family == "qwen3_moe":
        save_tiny(folder, **options)
    elif family == "minimax_m2":
        save_tiny_m2(folder, **options)
    else:
        save_tiny_of(folder, family, **options)


def logits(folder: Path, checkpoint: Path, family: str, **sections: Any) -> list[Tensor]:
    runner = make_runner(tiny_case(folder, checkpoint, model_name=family, **sections), folder)
    return prefill_logits(runner, PROMPTS)


@pytest.mark.parametrize("family", ["qwen3_moe", "minimax_m2", *TINY_OF])
def test_a_family_means_the_same(tmp_path: Path, family: str) -> None:
    options: dict[str, dict[str, Any]] = {"gpt_oss": {"swiglu_limit": 7.0}, "qwen2_moe": {"tie_word_embeddings": True}}
    save(tmp_path / "model", family, **options.get(family, {}))
    save_gguf(tmp_path / "model", tmp_path / "model.gguf", family)
    found, expected = (logits(tmp_path, tmp_path / name, family) for name in ("model.gguf", "model"))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def mixed(name: str) -> str:
    """Another type for each matrix."""
    kinds = [kind for kind in BY_NAME if kind != "MXFP4"]
    return "F32" if "norm" in name or "gate_inp" in name else kinds[sum(name.encode()) % len(kinds)]


def test_every_type_is_read(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", **SIZES)
    means = save_gguf(tmp_path / "model", tmp_path / "model.gguf", "qwen3_moe", mixed)
    none = {"quantization": {"method": "none"}}
    found, expected = (logits(tmp_path, path, "qwen3_moe", **none) for path in (tmp_path / "model.gguf", means))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


# Family, type of experts and of attention, what the CPU keeps them in
KEPT = [
    ("qwen3_moe", "Q4_0", "Q8_0", "q4", "q8"),
    ("qwen3_moe", "MXFP4", "Q5_0", "mxfp4", "q8"),
    ("glm4_moe", "IQ4_NL", "Q4_0", "q8", "q4"),
    ("gpt_oss", "MXFP4", "Q8_0", "mxfp4", "q8"),
    ("gpt_oss", "Q8_0", "F16", "q8", "float32"),
    ("minimax_m2", "Q4_0", "Q6_K", "q4", "float32"),
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("family", "experts", "attention", "kept", "beside"), KEPT)
def test_every_bit_is_kept(
    tmp_path: Path, family: str, experts: str, attention: str, kept: str, beside: str, ranks: int
) -> None:
    def kinds(name: str) -> str:
        kind = experts if "_exps.weight" in name else attention if "attn_" in name and "weight" in name else "F32"
        return "F32" if "norm" in name or "sinks" in name else kind

    save(tmp_path / "model", family, **SIZES | {"swiglu_limit": 7.0})
    means = save_gguf(tmp_path / "model", tmp_path / "model.gguf", family, kinds)
    for rank in range(ranks):
        found, expected = (built(tmp_path, path, family, rank, ranks) for path in (tmp_path / "model.gguf", means))
        for (path, ours), (_, theirs) in zip(layers_of(found), layers_of(expected), strict=True):
            if isinstance(ours, Experts):
                a, b = cast(NativeExperts, ours.weights), cast(NativeExperts, theirs.weights)
                assert a.w13.format.kind == a.w2.format.kind == kept
                for expert, which in itertools.product(range(ours.experts), ("gate", "up", "down")):
                    assert torch.equal(a.dequantised(expert, which), b.dequantised(expert, which))
            elif isinstance(ours, RowLinear | MergedLinear):
                mine, other = (cast(Any, layer).weight.packed for layer in (ours, theirs))
                assert "self_attn" not in path or mine.format.kind == beside
                assert torch.equal(mine.dequantised(0, ours.weight.rows), other.dequantised(0, ours.weight.rows))


def built(folder: Path, checkpoint: Path, family: str, rank: int, ranks: int) -> nn.Module:
    """This rank's model with its weights, without the other ranks."""
    sizes = {"world_size": ranks, "parallel_config": {"attn_tp_size": ranks, "moe_tp_size": ranks}}
    case = tiny_case(folder, checkpoint, model_name=family, **sizes)
    engine.start(1, "auto")
    build = build_of(case, load_ops("cpu"), parallel_of(case.parallel_sizes, rank, {}), torch.device("cpu"), True)
    model = cast(Any, model_class(family)(load_model_config(case), build))
    load_checkpoint(model, model_folder(case), read_scheme(model_folder(case)), model.ignores, progress=False)
    return cast(nn.Module, model)
