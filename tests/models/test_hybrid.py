"""Families with gated DeltaNet layers, compared with transformers, and with themselves in other steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.families.pictured import save_pictured
from tests.quantised import is_quantised, quantise_tiny
from tests.tiny import make_runner, oracle_logits, save_tiny_of, tiny_case
from tests.variants import covering, thorough_but
from umbra.base.errors import UserError
from umbra.commands.logits import collect_logits, prefill_logits

LENGTHS = 1, 2, 3, 4, 63, 64, 65, 130
IDS = [[(7 * i + 31 * length) % 319 + 1 for i in range(length)] for length in LENGTHS]
MODELS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "qwen3_next": lambda folder: save_tiny_of(folder, "qwen3_next"),
    "qwen3_5_moe": lambda folder: save_pictured(folder, "qwen3_5_moe", shared_expert_intermediate_size=48),
    "qwen4_exp": lambda folder: save_tiny_of(folder, "qwen4_exp"),
    "qwen3_5": lambda folder: save_pictured(folder, "qwen3_5", num_hidden_layers=4),
}


@pytest.mark.parametrize("family", thorough_but(MODELS, "qwen3_next", "qwen3_5", "qwen4_exp"))
def test_logits_do_not_depend_on_steps(tmp_path: Path, family: str) -> None:
    """Cuts are inside of the convolution's window and at lengths that other engines' chunks have."""

    def logits_in(chunk: int) -> dict[str, np.ndarray]:
        sizes = {"input_max_len": LENGTHS[-1], "batch_size": len(IDS), "chunked_prefill_size": chunk}
        runner = make_runner(tiny_case(tmp_path, tmp_path / "model", model_name=family, data_config=sizes), tmp_path)
        return collect_logits(runner, IDS, 2)

    oracle, ours = MODELS[family](tmp_path / "model"), logits_in(1024)
    for i in range(len(IDS)):
        expected = oracle_logits(oracle, ours[f"ids_{i}"].tolist()).numpy()
        assert expected.std() > 0.5
        np.testing.assert_allclose(np.concatenate([ours[f"prefill_{i}"], ours[f"decode_{i}"]]), expected, atol=1e-4)
    for chunk in (1, 2, 3, 7, 16, 64):
        for name, logits in logits_in(chunk).items():
            np.testing.assert_array_equal(logits, ours[name])


SMALL = "linear_attn.in_proj_ba", "linear_attn.in_proj_b", "linear_attn.in_proj_a"
EACH = [f"model.layers.{i}.{name}" for i in range(8) for name in SMALL]
# As published: the format, what of the layers stays in floats, and what the config says of that.
PUBLISHED: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "fp8": ("fp8", SMALL, {"modules_to_not_convert": ["lm_head", *EACH]}),
    "experts": ("gptq", ("attn.", "shared_expert."), {"dynamic": {"-:.*attn.*": {}, "-:.*shared_expert.*": {}}}),
    "awq": ("awq", ("linear_attn.",), {"modules_to_not_convert": ["linear_attn", "mlp.gate", "shared_expert_gate"]}),
    "compressed": ("pack-quantized", SMALL, {"ignore": ["lm_head", *EACH]}),
    "all": ("pack-quantized", (), {}),
}


@pytest.mark.parametrize(("published", "family"), covering(list(PUBLISHED), ["qwen3_next", "qwen3_5_moe", "qwen3_5"]))
def test_published_quantisations_mean_their_floats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, published: str
) -> None:
    """Lists of modules name them without the part `language_model` that files have."""
    wide = {"hidden_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    wide |= {"intermediate_size": 128}
    if family == "qwen3_next":
        save_tiny_of(tmp_path / "model", family, **wide)
    else:
        save_pictured(tmp_path / "model", family, False, **wide)
    format, floats, settings = PUBLISHED[published]

    def quantised(name: str) -> bool:
        linear = is_quantised(name) or "linear_attn.in_proj" in name
        return linear and "visual" not in name and not any(part in name for part in floats)

    def logits(folder: Path, method: str) -> torch.Tensor:
        case = tiny_case(
            tmp_path, folder, model_name=family, data_config={"input_max_len": 64}, quantization={"method": method}
        )
        return torch.cat(prefill_logits(make_runner(case, tmp_path), IDS[2:5]))

    means = quantise_tiny(tmp_path / "model", tmp_path / "it", format, 32, 4, True, quantised, **settings)
    expected = logits(means, "none")
    for method, most in (("none", 1e-4), ("auto", 0.2)):
        assert (logits(tmp_path / "it", method) - expected).abs().mean() < most * expected.abs().mean()
    assert "warning" not in capsys.readouterr().out


def test_files_of_mlx_are_refused(tmp_path: Path) -> None:
    """Their norms have the one already, and names differ."""
    save_tiny_of(tmp_path / "model", "qwen3_next", num_hidden_layers=4)
    path = tmp_path / "model" / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "mlx"})
    with pytest.raises(UserError, match=r"model\.safetensors: MLX wrote it"):
        make_runner(tiny_case(tmp_path, tmp_path / "model", model_name="qwen3_next"), tmp_path)
