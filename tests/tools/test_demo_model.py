"""The MiniMax-M2 demo's training: balance by the selection bias alone."""

import pytest
import torch

from tools.demo_model.minimax_m2 import BIAS_RATE, CONFIG, FREEZE, MiniMaxM2


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
