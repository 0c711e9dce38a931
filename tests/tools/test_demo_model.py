"""The MiniMax-M2 demo's training: balance by the selection bias alone, and files as the official ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tools.demo_model.minimax_m2 import BIAS_RATE, CONFIG, EXPERTS, FREEZE, LAYERS, MiniMaxM2


@pytest.fixture
def demo() -> MiniMaxM2:
    torch.manual_seed(0)
    return MiniMaxM2()


def test_the_bias_rises_for_the_idle_and_falls_for_the_busy(demo: MiniMaxM2) -> None:
    x = torch.arange(256).view(2, 128)
    demo.model(input_ids=x, labels=x).loss.backward()
    demo.after_step(progress=0.0)
    for block in demo.blocks:
        load, bias = demo.loads[block.gate], block.e_score_correction_bias
        assert load.sum() == x.numel() * CONFIG["num_experts_per_tok"]
        assert load.std() > 1  # there is something to balance
        torch.testing.assert_close(bias, BIAS_RATE * torch.sign(load.mean() - load))
        assert not bias.requires_grad
    before = [block.e_score_correction_bias.clone() for block in demo.blocks]
    demo.after_step(progress=1.0 - FREEZE / 2)
    for block, old in zip(demo.blocks, before, strict=True):
        torch.testing.assert_close(block.e_score_correction_bias, old * 1.5)
    demo.after_step(progress=1.0)  # frozen
    for block, old in zip(demo.blocks, before, strict=True):
        torch.testing.assert_close(block.e_score_correction_bias, old * 1.5)


def test_saved_with_official_names_and_types(demo: MiniMaxM2, tmp_path: Path) -> None:
    demo.save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    layer = "model.layers.{}.block_sparse_moe."
    experts = {
        layer.format(i) + f"experts.{e}.{w}.weight"
        for i in range(LAYERS)
        for e in range(EXPERTS)
        for w in ("w1", "w2", "w3")
    }
    assert experts <= set(types)
    assert len(types) == 3 + LAYERS * (8 + 2 + 3 * EXPERTS)
    float32 = {layer.format(i) + name for i in range(LAYERS) for name in ("gate.weight", "e_score_correction_bias")}
    assert {name for name, type in types.items() if type == "F32"} == float32
    assert {type for name, type in types.items() if name not in float32} == {"BF16"}
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
