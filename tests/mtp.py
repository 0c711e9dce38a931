"""Tiny random checkpoints with a layer that predicts further tokens, beside transformers' of it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from tests.tiny import save_tiny_of
from umbra.models.registry import family as record_of

KINDS = ["linear_attention", "full_attention", "full_attention"]


class Oracle:
    """The layer of a checkpoint with one, as transformers computes it, over whole sequences."""

    def __init__(self, folder: Path, family: str, **options: Any):
        """Writes the checkpoint: a model whose last layer becomes the further one."""
        hybrid = family in ("qwen3_next", "qwen3_5")
        sizes: dict[str, Any] = {"num_hidden_layers": 3} | ({"layer_types": KINDS} if hybrid else {})
        whole = save_tiny_of(folder, family, eos_token_id=None, **sizes | options)
        self.main, depth = whole, whole.config.num_hidden_layers - 1
        block = whole.model.layers.pop(depth)
        tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        own = record_of(family).mtp
        assert own
        at = own.path.format(depth)
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
            folder / "model.safetensors",
            {"format": "pt"},
        )
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
            (own.embedding, own.hidden, own.projection, own.norm),
            strict=True,
        ):
            module.weight.data.copy_(extra[name])

    @torch.no_grad()
    def guesses(self, ids: list[int], depth: int) -> list[tuple[Tensor, int]]:
        """`depth` guesses of what follows `ids`, with their logits."""
        hidden = self.main.model(torch.tensor([ids[:-1]])).last_hidden_state
        guessed, known = list[tuple[Tensor, int]](), ids[1:]
        for _ in range(depth):
            after = self.mtp.forward_layer(
                0, hidden, torch.arange(len(known))[None], None, input_ids=torch.tensor([known])
            )
            logits = self.main.lm_head(after[0, -1])
            guessed.append((logits, int(logits.argmax())))
            hidden = torch.cat((hidden, after[:, -1:]), 1)
            known = [*known, guessed[-1][1]]
        return guessed
