"""Train an EAGLE3 head (arXiv 2503.01840) for a demo model, on the text that it learned from, on one CPU core.

    .venv/bin/python -m umbra.tools.demo_model.eagle3 corpus checkpoints/austen_moe \\
        checkpoints/austen_moe_eagle3 --steps 400

As in the paper the head learns to guess several tokens ahead, from its own states ("training-time test").
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import Qwen3MoeForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from umbra.tools.demo_model.text import CONTEXT, POSITIONS, read_text

AHEAD = 3  # tokens that it learns to guess
LAYERS = [1, 2, 4]  # after which it reads hidden states
HEADS, KV_HEADS, HEAD_DIM, INNER, GUESSED, THETA, EPS = 4, 2, 32, 256, 1024, 10000.0, 1e-6
DECAY = 0.8  # of the losses of tokens further ahead


class Head(nn.Module):
    """Its modules have the names of published heads. `tokens` are the model's tokens that it can guess."""

    def __init__(self, hidden: int, tokens: Tensor):
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.tokens = tokens
        self.fc, self.lm_head = linear(3 * hidden, hidden), linear(hidden, len(tokens))
        self.midlayer, wide = nn.Module(), 2 * hidden
        self.midlayer.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(wide, HEADS * HEAD_DIM),
                "k_proj": linear(wide, KV_HEADS * HEAD_DIM),
                "v_proj": linear(wide, KV_HEADS * HEAD_DIM),
                "o_proj": linear(HEADS * HEAD_DIM, hidden),
            }
        )
        self.midlayer.mlp = nn.ModuleDict(
            {"gate_proj": linear(hidden, INNER), "up_proj": linear(hidden, INNER), "down_proj": linear(INNER, hidden)}
        )
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self.midlayer.add_module(name, nn.RMSNorm(hidden, EPS))
        self.norm = nn.RMSNorm(hidden, EPS)
        angles = torch.arange(CONTEXT)[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM).repeat(2)
        self.rotation = angles.cos()[None], angles.sin()[None]

    def forward(self, embedded: Tensor, state: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """A guess further ahead than those whose (keys, values) are `earlier`: row t has the embedding of token t + 1
        and the state of token t, or that which the guess before left at row t - 1. -> the states that it leaves"""
        layer = cast(Any, self.midlayer)
        parts, mlp, steps, length = layer.self_attn, layer.mlp, len(earlier), embedded.shape[1]
        both = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(state)), -1)
        q, k, v = (parts[f"{name}_proj"](both).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for name in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *(t[:, :length] for t in self.rotation))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        earlier.append((k, v))
        # Row t sees the rows up to t - steps as the model computed them, and of each guess since then one row.
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1 - steps)
        scores = [(q @ earlier[0][0].mT).masked_fill(ahead, -math.inf)]
        rows = [tuple(t.roll(steps - number, 2) for t in earlier[number]) for number in range(1, steps + 1)]
        weights = torch.cat((*scores, *((q * key).sum(-1, keepdim=True) for key, _ in rows)), -1) * HEAD_DIM**-0.5
        weights = weights.softmax(-1)
        x = weights[..., :length] @ earlier[0][1]
        x = x + sum(weights[..., length + number, None] * value for number, (_, value) in enumerate(rows))
        state = state + parts["o_proj"](x.transpose(1, 2).flatten(2))
        y = layer.post_attention_layernorm(state)
        return cast(Tensor, state + mlp["down_proj"](silu(mlp["gate_proj"](y)) * mlp["up_proj"](y)))

    def ahead(self, model: Qwen3MoeForCausalLM, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Logits (rows, length - 1, GUESSED) of each guess, and the model's own of the same tokens. The first rows of
        guesses further ahead mean nothing."""
        with torch.no_grad():
            states: list[Tensor] = []
            hooks = [
                model.model.layers[layer].register_forward_hook(lambda *call: states.append(call[2][:, :-1]))
                for layer in LAYERS
            ]
            out = model(input_ids=x, output_router_logits=False)
            for hook in hooks:
                hook.remove()
            tapped = torch.cat(states, -1)
            embedded = model.model.embed_tokens(x[:, 1:])
        state, earlier, drafted = self.fc(tapped), list[tuple[Tensor, Tensor]](), list[Tensor]()
        for _ in range(AHEAD):
            state = self(embedded, state, earlier)
            drafted.append(self.lm_head(self.norm(state)))
            state = state.roll(1, 1)
        return drafted, out.logits[:, 1:]

    def save(self, out: Path, model: Qwen3MoeForCausalLM) -> None:
        vocabulary, hidden = model.config.vocab_size, model.config.hidden_size
        told = torch.zeros(vocabulary, dtype=torch.bool)
        told[self.tokens] = True
        maps = {"d2t": self.tokens - torch.arange(len(self.tokens)), "t2d": told}
        save_file({name: t.bfloat16() for name, t in self.state_dict().items()} | maps, out / "model.safetensors")
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "attention_bias": False,
            "draft_vocab_size": GUESSED,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS, "use_aux_hidden_state": True},
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": INNER,
            "max_position_embeddings": POSITIONS,
            "model_type": "llama",
            "num_attention_heads": HEADS,
            "num_hidden_layers": 1,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": EPS,
            "rope_scaling": None,
            "rope_theta": THETA,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": vocabulary,
        }
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def acceptance(head: Head, model: Qwen3MoeForCausalLM, tokens: Tensor) -> list[float]:
    """Returns for each position of a guess the share that is the model's first choice, over windows of the held-out
    text, whose tokens the head is given."""
    rows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)[::4]
    hits = torch.zeros(AHEAD)
    for x in rows.split(16):
        drafted, own = head.ahead(model, x)
        right = [(head.tokens[logits.argmax(-1)] == own.argmax(-1))[:, AHEAD:] for logits in drafted]
        hits += torch.stack([of.sum() for of in right])
    return [round(float(of) / (len(rows) * (CONTEXT - 1 - AHEAD)), 4) for of in hits]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    random, text = np.random.default_rng(args.seed), read_text(args.corpus)
    model = Qwen3MoeForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval().requires_grad_(False)
    counts = torch.bincount(torch.cat((text.prose, text.chat)), minlength=model.config.vocab_size)
    head = Head(model.config.hidden_size, counts.topk(GUESSED).indices.sort().values)
    print(f"{sum(p.numel() for p in head.parameters()) / 1e3:.0f} k parameters", flush=True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    log: list[dict[str, Any]] = []
    start = time.process_time()
    for step in range(1, args.steps + 1):
        rate = args.lr * min(step / 50, 0.02 + 0.49 * (1 + math.cos(math.pi * step / args.steps)))
        optimizer.param_groups[0]["lr"] = rate
        drafted, own = head.ahead(model, text.batch(random))
        chances = own.softmax(-1)[..., head.tokens][:, AHEAD:]
        losses = [-(chances * logits[:, AHEAD:].log_softmax(-1)).sum(-1).mean() for logits in drafted]
        loss = cast(Tensor, sum(DECAY**number * of for number, of in enumerate(losses)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0 or step == args.steps:
            right = acceptance(head, model, text.valid)
            row = dict(step=step, losses=[round(float(of.detach()), 4) for of in losses], acceptance=right)
            log.append(row | {"cpu_s": round(time.process_time() - start)})
            print(json.dumps(log[-1]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    head.save(args.out, model)
    (args.out / "train_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
