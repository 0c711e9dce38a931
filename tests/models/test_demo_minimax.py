"""The trained MiniMax-M2 demo: the same logits as transformers', and a selection bias that does its work."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, MiniMaxM2ForCausalLM

from executor.config.load import load_case
from tests.tiny import make_runner, oracle_logits
from umbra.commands.logits import collect_logits, sized_for
from umbra.files import ROOT

FOLDER = ROOT / "checkpoints/austen_minimax"
HELD_OUT = ROOT / "checkpoints/austen_moe/held_out.txt"


@pytest.fixture(scope="module")
def oracle() -> MiniMaxM2ForCausalLM:
    return MiniMaxM2ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_demo_model_equals_transformers(oracle: MiniMaxM2ForCausalLM, tmp_path: Path) -> None:
    case = load_case("demo_minimax", ["dtype=float32", "method=none"])
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = [tokenizer(p).input_ids for p in case.data_config.prompts]
    arrays = collect_logits(make_runner(sized_for(case, ids, 12), tmp_path), ids, steps=12)
    for i in range(len(ids)):
        expected = oracle_logits(oracle, arrays[f"ids_{i}"].tolist()).numpy()
        ours = np.concatenate([arrays[f"prefill_{i}"], arrays[f"decode_{i}"]])
        np.testing.assert_allclose(ours, expected, atol=1e-4)


def chosen_experts(model: MiniMaxM2ForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """The experts that each token of (rows, length) chooses, sorted: (layers, tokens, top k)."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, routed: chosen.append(routed[2].sort().values))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=rows)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen)


def busiest(chosen: torch.Tensor, experts: int) -> list[float]:
    """Per layer the load of the busiest expert, in mean loads."""
    loads = [torch.bincount(layer.flatten(), minlength=experts).float() for layer in chosen]
    return [float(load.max() / load.mean()) for load in loads]


def test_the_selection_bias_balances_the_experts(oracle: MiniMaxM2ForCausalLM) -> None:
    """On held-out text; without its bias the same model would favour some experts."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, model_max_length=1 << 20)
    ids = tokenizer(HELD_OUT.read_text()[:24_000]).input_ids
    rows = torch.tensor(ids[: len(ids) // 256 * 256]).view(-1, 256)
    biases = [layer.mlp.e_score_correction_bias for layer in oracle.model.layers]
    trained = [bias.clone() for bias in biases]
    with_bias = chosen_experts(oracle, rows)
    try:
        for bias in biases:
            bias.zero_()
        without = chosen_experts(oracle, rows)
    finally:
        for bias, values in zip(biases, trained, strict=True):
            bias.copy_(values)
    experts = oracle.config.num_local_experts
    assert max(busiest(with_bias, experts)) < 1.4 < min(busiest(without, experts))
    assert (with_bias != without).any(-1).float().mean() > 0.3  # of the tokens choose other experts
