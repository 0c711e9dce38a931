"""Tiny checkpoints of families with gated DeltaNet layers, and a model whose steps a test makes by hand."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from executor.checkpoint.formats.detect import read_scheme
from executor.checkpoint.load import load_checkpoint
from executor.config.load import load_model_config
from executor.engine.kv_caches import bind_caches
from executor.engine.weight_formats import build_of
from models.batch import Batch
from models.layers.states import RecurrentStates
from models.registry import family_in, model_class
from ops import load_ops
from ops.interface import Recurrent, fixed, tensor_of
from ops.parallel.groups import Parallel
from tests.tiny import tiny_case

TINY: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=48,
    max_position_embeddings=256,
    eos_token_id=0,
)
# Mean and spread of tensors with these in their names. Decays are from about a half to 0.999; layers change little of
# the residual, so that errors stay small.
RANDOM = {
    "linear_attn.norm": (1.0, 0.3), "norm": (0.0, 0.3), "dt_bias": (-2.0, 1.0), "A_log": (0.0, 1.0),
    "conv1d": (0.0, 0.5), "embed": (0.0, 1.0), "mlp.gate.": (0.0, 0.3), "in_proj_ba": (0.0, 0.3),
    "in_proj_b": (0.0, 0.3), "in_proj_a": (0.0, 0.3), "shared_expert_gate": (0.0, 0.3),
}  # fmt: skip
PAGE = 4
PAGES = 64  # of a sequence


def pictured(**settings: Any) -> Qwen3_5MoeConfig:
    """The config of a model that sees pictures, with as little of that as can be."""
    sight = dict(depth=1, hidden_size=8, num_heads=2, intermediate_size=8, out_hidden_size=settings["hidden_size"])
    return Qwen3_5MoeConfig(text_config=settings, vision_config=sight)


KINDS: dict[str, tuple[Any, Any]] = {  # config and model
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_5_moe": (pictured, Qwen3_5MoeForConditionalGeneration),
}


def save_tiny_hybrid(folder: Path, kind: str, fused_experts: bool = False, **options: Any) -> PreTrainedModel:
    """A random model saved to `folder` in float32; returned in evaluation mode as the oracle. What transformers starts
    at zero or one, or so that states forget at once, is random. `fused_experts`: as official files have them."""
    torch.manual_seed(3)
    config, model_class = KINDS[kind]
    model: PreTrainedModel = model_class(config(**TINY | options)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            mean, spread = next((of for end, of in RANDOM.items() if end in name), (0.0, 0.08))
            tensor.normal_(mean, spread)
    model.save_pretrained(folder)
    if fused_experts:
        path = folder / "model.safetensors"
        tensors = {name: t for name, t in load_file(path).items() if ".experts." not in name}
        own = {n: t.data.contiguous() for n, t in model.named_parameters() if ".experts." in n}
        save_file(tensors | own, path)
    return model


class ByHand:
    """The model of a folder, of which each sequence has pages of its own, and two places of states, which it uses in
    turn: 2 s and 2 s + 1."""

    def __init__(self, folder: Path, ids: Sequence[Sequence[int]], **sections: Any):
        self.ids, self.done, self.places = ids, [0] * len(ids), [-1] * len(ids)
        sections = {"data_config": {"input_max_len": PAGES * PAGE - 8}} | sections
        case = tiny_case(folder.parent, folder, model_name=family_in(folder), **sections)
        scheme, self.ops, device = read_scheme(folder), load_ops("cpu"), torch.device("cpu")
        build = build_of(case, self.ops, Parallel(), device, False)
        self.model = model_class(case.model_name)(load_model_config(case), build)
        load_checkpoint(self.model, folder, scheme, self.model.ignores, False)
        bind_caches(self.model, case, build, PAGES * len(ids))
        self.states = [module for module in self.model.modules() if isinstance(module, RecurrentStates)]
        for number, states in enumerate(self.states):
            conv, delta = (torch.full((2 * len(ids), *s), torch.nan) for s in (states.conv_shape, states.delta_shape))
            states.bind(fixed(conv), fixed(delta), number)

    @torch.inference_mode()
    def step(self, counts: dict[int, int]) -> dict[int, Tensor]:
        """Computes so many further tokens of these sequences. -> the logits of these"""
        slots, positions, starts, lengths = array("q"), array("q"), array("q", [0]), array("q")
        tokens: list[int] = []
        for s, count in counts.items():
            first, end = self.done[s], self.done[s] + count
            tokens += self.ids[s][first:end]
            positions.extend(range(first, end))
            slots.extend(s * PAGES * PAGE + position for position in range(first, end))
            starts.append(len(tokens))
            lengths.append(end)
            self.done[s] = end
        tables = torch.tensor([list(range(s * PAGES, (s + 1) * PAGES)) for s in counts])
        reads = [self.places[s] for s in counts]
        for s in counts:
            self.places[s] = 2 * s + (self.places[s] == 2 * s)
        rows = (reads, [self.places[s] for s in counts], [0] * len(reads), [0] * len(reads))
        recurrent = Recurrent(
            tensor_of(starts), *(torch.tensor([row] * len(self.states), dtype=torch.int32) for row in rows)
        )
        paged = self.ops.paging(slots, tables, starts, lengths, PAGE)
        batch = Batch(torch.tensor(tokens), tensor_of(positions), (paged,), None, None, recurrent=recurrent)
        return dict(zip(counts, self.model(batch).split(list(counts.values())), strict=True))
