"""EAGLE3 heads, compared with a reference in plain torch: the same guesses after prompts, in chunks, and while drafts
are accepted and refused, whatever sizes and layout a head has; what does not fit the model is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.families.minimax_m2 import AS_OTHERS
from tests.models.guesses import compare_guesses
from tests.tiny import make_runner, save_tiny, save_tiny_m2, tiny_case
from umbra.base.errors import UserError

EPS, THETA, GUESSED = 1e-5, 5000.0, 40
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


class Head:
    """A random head for `main`, which is saved to `folder` and computes guesses over whole sequences. `hidden`: it has
    an embedding and a width of its own, and the layout of speculators. `newer`: it has the norms of EAGLE3.1, or
    NVIDIA's norm and rotation."""

    def __init__(
        self,
        folder: Path,
        main: PreTrainedModel,
        layers: list[int],
        taps: tuple[int, ...],
        hidden: int = 0,
        newer: bool = False,
    ):
        torch.manual_seed(3)
        self.newer = newer
        self.main, self.taps, self.own = main, taps, hidden > 0
        target, vocabulary = main.config.hidden_size, main.config.vocab_size
        size, self.heads, self.kv_heads, self.dim = hidden or target, 4, 1 if hidden else 4, main.config.head_dim
        shapes: dict[str, Any] = {"self_attn.q_proj": (self.heads * self.dim, 2 * size)}
        shapes |= {"self_attn.o_proj": (size, self.heads * self.dim)}
        shapes |= {"self_attn.k_proj": (self.kv_heads * self.dim, 2 * size), "mlp.gate_proj": (40, size)}
        shapes |= {"self_attn.v_proj": (self.kv_heads * self.dim, 2 * size), "mlp.up_proj": (40, size)}
        shapes |= {"mlp.down_proj": (size, 40), "input_layernorm": (size,), "hidden_norm": (size,)}
        shapes |= {"post_attention_layernorm": (size,)}
        names = {f"layers.0.{name}.weight": shape for name, shape in shapes.items()}
        names |= {"fc.weight": (size, 3 * target), "norm.weight": (size,), "lm_head.weight": (GUESSED, size)}
        names |= {"embed_tokens.weight": (vocabulary, size)} if hidden else {}
        if newer:
            norms = (
                {f"fc_norm.{i}.weight": (target,) for i in range(3)} if hidden else {"input_norm.weight": (3 * target,)}
            )
            names |= norms
        self.weights = {name: torch.randn(shape) * 0.2 + (len(shape) == 1) for name, shape in names.items()}
        self.tokens = torch.randperm(vocabulary)[:GUESSED].sort().values
        plain: dict[str, Any] = {"model_type": "llama", "hidden_size": size, "intermediate_size": 40}
        plain |= {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.dim}
        plain |= {"rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": vocabulary, "num_hidden_layers": 1}
        plain |= {"attention_bias": False, "hidden_act": "silu"}
        config: dict[str, Any] = {"draft_vocab_size": GUESSED}
        if hidden:
            config |= {"transformer_layer_config": plain, "target_hidden_size": target, "norm_before_residual": True}
            config |= {"eagle_aux_hidden_state_layer_ids": layers, "fc_norm": newer, "norm_output": newer}
        else:
            config |= plain | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers or None}}
            config["eagle_config"] |= {"norm_before_fc": newer, "use_last_layernorm": True, "parallel_draft_step": 1}
            config |= {"rope_scaling": LLAMA3} if newer else {}
        rotary = LlamaConfig(
            hidden_size=self.dim,
            num_attention_heads=1,
            rope_parameters={"rope_theta": THETA, **(LLAMA3 if newer and not hidden else {"rope_type": "default"})},
        )
        self.rates = LlamaRotaryEmbedding(rotary).inv_freq.repeat(2)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        theirs = {True: ("layers.0", "model.layers.0"), False: ("layers.0", "midlayer")}[newer and not hidden]
        stored = self.weights if hidden else {k.replace(*theirs): v for k, v in self.weights.items()}
        maps = {"d2t": self.tokens - torch.arange(GUESSED), "t2d": torch.zeros(vocabulary, dtype=torch.bool)}
        save_file(stored | maps, folder / "model.safetensors")

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], EPS)

    def logits(self, state: Tensor) -> Tensor:
        return self.norm("norm", state) @ self.weights["lm_head.weight"].T

    def logits_of_left(self, state: Tensor) -> Tensor:
        """Returns the logits of a state that a guess leaves."""
        return state @ self.weights["lm_head.weight"].T if self.newer and self.own else self.logits(state)

    @torch.no_grad()
    def guesses(self, ids: list[int], depth: int) -> list[tuple[Tensor, int]]:
        hidden = self.main.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        tapped = [hidden[tap][0] for tap in self.taps]
        if self.newer and self.own:
            tapped = [self.norm(f"fc_norm.{i}", x) for i, x in enumerate(tapped)]
        states = torch.cat(tapped, -1)
        if self.newer and not self.own:
            states = self.norm("input_norm", states)
        states = states @ self.weights["fc.weight"].T
        guessed, known = list[tuple[Tensor, int]](), ids[1:]
        for _ in range(depth):
            last = self._layer(torch.tensor(known), states)[-1:]
            logits = self.logits(last[0])
            guessed.append((logits, int(self.tokens[logits.argmax()])))
            state = self.norm("norm", last) if self.newer and self.own else last
            states, known = torch.cat((states, state)), [*known, guessed[-1][1]]
        return guessed

    def _layer(self, known: Tensor, states: Tensor) -> Tensor:
        table = self.weights["embed_tokens.weight"] if self.own else self.main.model.embed_tokens.weight
        normed, at = self.norm("layers.0.hidden_norm", states), "layers.0.self_attn"
        both = torch.cat((self.norm("layers.0.input_layernorm", table[known]), normed), -1)
        q, k, v = (
            (both @ self.weights[f"{at}.{name}_proj.weight"].T).unflatten(-1, (-1, self.dim)).transpose(0, 1)
            for name in "qkv"
        )
        angles = torch.arange(len(known))[:, None] * self.rates
        q, k = (
            x * angles.cos() + torch.cat((-x[..., self.dim // 2 :], x[..., : self.dim // 2]), -1) * angles.sin()
            for x in (q, k)
        )
        x = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = (normed if self.own else states) + x.transpose(0, 1).flatten(1) @ self.weights[f"{at}.o_proj.weight"].T
        y = self.norm("layers.0.post_attention_layernorm", x)
        gate, up, down = (self.weights[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        return x + (F.silu(y @ gate) * (y @ up)) @ down


def drafted(folder: Path, family: str, **sections: Any) -> Any:
    return tiny_case(
        folder,
        folder / "model",
        model_name=family,
        data_config={"batch_size": 2, "chunked_prefill_size": 9},
        draft_config={"method": "eagle3", "model_path": str(folder / "head"), "tokens": 3},
        **sections,
    )


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "minimax_m2"])
def test_guesses_are_those_of_the_reference(tmp_path: Path, family: str, newer: bool) -> None:
    """Older heads also run with an arena, beside which their pages lie."""
    if family == "qwen3_moe":
        main: PreTrainedModel = save_tiny(tmp_path / "model", num_hidden_layers=8, eos_token_id=None)
        head = Head(tmp_path / "head", main, [], (2, 4, 5), newer=newer)
    else:
        main = save_tiny_m2(tmp_path / "model", **AS_OTHERS | {"num_hidden_layers": 6})
        head = Head(tmp_path / "head", main, [1, 2, 4], (2, 3, 5), hidden=48, newer=newer)
    case = drafted(tmp_path, family, **({"offload_config": {"mode": "resident"}} if not newer else {}))
    compare_guesses(make_runner(case, tmp_path).loop, head.guesses, head.logits_of_left)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    main = save_tiny(tmp_path / "model", num_hidden_layers=8)
    Head(tmp_path / "head", main, [], (2, 4, 5))
    config, tensors = tmp_path / "head" / "config.json", tmp_path / "head" / "model.safetensors"
    settings, weights = json.loads(config.read_text()), load_file(tensors)

    def refusal(changes: dict[str, Any], own: dict[str, Tensor] | None = None) -> str:
        config.write_text(json.dumps(settings | changes))
        save_file({name: t for name, t in (weights | (own or {})).items() if len(t)}, tensors)
        with pytest.raises(UserError) as error:
            make_runner(drafted(tmp_path, "qwen3_moe"), tmp_path)
        return str(error.value)

    assert "vocab_size: 97 is not the model's: 96" in refusal({"vocab_size": 97})
    assert "hidden_size: 64 is not the model's: 32" in refusal({"hidden_size": 64})
    assert "layer_types: ['sliding_attention'] is not" in refusal({"layer_types": ["sliding_attention"]})
    assert "1 tensors missing: input_norm.weight" in refusal({"norm_before_fc": True})
    assert "fc_norm: True with norm_before_fc is not" in refusal({"norm_before_fc": True, "fc_norm": True})
    assert "use_last_layernorm: False is not" in refusal({"eagle_config": {"use_last_layernorm": False}})
    for layers in ([2, 4], [2, 4, 9], [4, 2, 5], [0, 2, 4]):
        assert "must be 3 different layers" in refusal({"eagle_aux_hidden_state_layer_ids": layers})
    assert "d2t: names token 96, outside" in refusal({}, {"d2t": torch.full([GUESSED], 96 - GUESSED + 1)})
    assert "1 tensors missing: d2t" in refusal({}, {"d2t": torch.zeros(0)})
    assert "tensors missing: embed_tokens.weight" in refusal({"hidden_size": 64, "target_hidden_size": 32})
    assert "does not know: input_norm.weight" in refusal({}, {"input_norm.weight": torch.ones(96)})
