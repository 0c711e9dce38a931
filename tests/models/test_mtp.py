"""Layers that predict further tokens, compared with transformers: the same logits after prompts, in chunks and while
drafts are accepted and refused, and the same guesses going on from guesses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from models.hybrid import MTP
from models.layers.mtp import DEEPSEEK_MTP
from tests.models.guesses import compare_guesses
from tests.tiny import make_runner, save_tiny_of, tiny_case
from umbra.errors import UserError

FAMILIES = "glm4_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_next"
KINDS = ["linear_attention", "full_attention", "full_attention"]


class Oracle:
    """The layer of a checkpoint with one, as transformers computes it, over whole sequences."""

    def __init__(self, folder: Path, family: str, **options: Any):
        """Writes the checkpoint: a model whose last layer becomes the further one."""
        hybrid = family == "qwen3_next"
        sizes: dict[str, Any] = {"num_hidden_layers": 3} | ({"layer_types": KINDS} if hybrid else {})
        whole = save_tiny_of(folder, family, eos_token_id=None, **sizes | options)
        self.main, depth = whole, whole.config.num_hidden_layers - 1
        block = whole.model.layers.pop(depth)
        tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        own, at = (MTP, "mtp") if hybrid else (DEEPSEEK_MTP, f"model.layers.{depth}")
        if hybrid:
            tensors = {
                name.replace(f"model.layers.{depth}.", "mtp.layers.0."): tensor for name, tensor in tensors.items()
            }
        size = whole.config.hidden_size
        base = 0.0 if hybrid else 1.0
        extra = {name: base + 0.3 * torch.randn(size) for name in (own.embedding, own.hidden, own.norm)}
        extra[own.projection] = torch.randn(size, 2 * size) * 0.1
        save_file(
            tensors | {f"{at}.{name}.weight": t for name, t in extra.items()},
            folder / "model.safetensors", {"format": "pt"},
        )  # fmt: skip
        config |= {"num_hidden_layers": depth, "mtp_num_hidden_layers" if hybrid else "num_nextn_predict_layers": 1}
        config |= {name: config[name][:depth] for name in ("layer_types", "mlp_layer_types") if config.get(name)}
        (folder / "config.json").write_text(json.dumps(config))
        whole.config.num_mtp_layers = 1
        whole.config.num_hidden_layers = depth
        whole.config.mtp_layer_types, whole.config.mtp_mlp_layer_types = ["full_attention"], ["sparse"]
        self.mtp = MtpModel(whole, 1).eval()
        layer = self.mtp.layers[0]
        layer.mtp_block.load_state_dict(block.state_dict())
        for module, name in zip(
            (layer.enorm, layer.hnorm, layer.eh_proj, layer.post_norm),
            (own.embedding, own.hidden, own.projection, own.norm), strict=True,
        ):  # fmt: skip
            module.weight.data.copy_(extra[name])

    @torch.no_grad()
    def guesses(self, ids: list[int], depth: int) -> list[tuple[Tensor, int]]:
        """`depth` guesses of what follows `ids`, with their logits."""
        hidden = self.main.model(torch.tensor([ids[:-1]])).last_hidden_state
        found, known = list[tuple[Tensor, int]](), ids[1:]
        for _ in range(depth):
            after = self.mtp.forward_layer(
                0, hidden, torch.arange(len(known))[None], None, input_ids=torch.tensor([known])
            )
            logits = self.main.lm_head(after[0, -1])
            found.append((logits, int(logits.argmax())))
            hidden = torch.cat((hidden, after[:, -1:]), 1)
            known = [*known, found[-1][1]]
        return found


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """After guesses of the layer those that the model chooses."""
    oracle = Oracle(tmp_path / "model", family)
    case = tiny_case(
        tmp_path, tmp_path / "model", model_name=family, data_config={"batch_size": 2, "chunked_prefill_size": 9},
        draft_config={"method": "mtp", "tokens": 3},
    )  # fmt: skip
    loop = make_runner(case, tmp_path).loop
    compare_guesses(loop, oracle.guesses, loop.engine.model.lm_head)


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    save_tiny_of(tmp_path / "model", "qwen2_moe")
    case = tiny_case(tmp_path, tmp_path / "model", model_name="qwen2_moe", draft_config={"method": "mtp"})
    with pytest.raises(UserError, match=r"draft_config.method: mtp: the model has no layers"):
        make_runner(case, tmp_path)
