"""The config.json of an EAGLE3 head (arXiv 2503.01840), as one checked dataclass: in the layout that SpecForge, NVIDIA
and EAGLE's authors publish, or in that of vLLM's speculators."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.config import ModelConfig, check_even_split, check_heads, check_kv_split
from umbra.models.hf_config import HfConfig, read_hf_config
from umbra.models.rope import RopeConfig, read_rope

ALIASES = {"midlayer": "layers.0", "model": ""}  # parts of tensors' names that files have, each with the head's
TAPS = 3


@dataclass(frozen=True)
class Eagle3Config:
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    vocab_size: int
    draft_vocab_size: int  # tokens that it can guess
    target_hidden_size: int
    taps: tuple[int, ...]  # it reads the model's hidden states before these layers, of which one may be after the last
    norm_before_residual: bool  # whether its layer adds to the normalised state
    # Of EAGLE3.1: whether it normalises the three hidden states, together or each, and goes on from normalised states.
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    own_embedding: bool = False  # whether it has an embedding of its own, in place of the model's
    mapped: bool = False  # whether it says which tokens it can guess; else they are the first ones

    @classmethod
    def from_folder(cls, folder: Path, model: ModelConfig) -> "Eagle3Config":
        """Reads `folder`/config.json, of a head for `model`."""
        hf = read_hf_config(folder)
        inner = hf.inner("transformer_layer_config") if hf.value("transformer_layer_config") is not None else hf
        inner.refuse("model_type", "llama")
        inner.refuse("hidden_act", "silu")
        for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
            inner.refuse(name, False)
        inner.refuse("num_hidden_layers", 1)
        inner.refuse("layer_types", ["full_attention"])
        hf.refuse("quantization_config")
        eagle = hf.inner("eagle_config") if hf.value("eagle_config") is not None else HfConfig({}, hf.where)
        for name in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"):
            eagle.refuse(name, True)
        eagle.refuse("use_mtp_layernorm", False)
        eagle.refuse("parallel_draft_step", 1)
        norms = {name: hf.flag(name, eagle.flag(name, False)) for name in ("norm_before_fc", "fc_norm", "norm_output")}
        if norms["norm_before_fc"] and norms["fc_norm"]:
            raise hf.error("fc_norm", "with norm_before_fc is not implemented")
        hidden, heads = inner.size("hidden_size"), inner.size("num_attention_heads")
        vocabulary = inner.size("vocab_size")
        head_dim = inner.size("head_dim", default=max(hidden // heads, 1))
        config = cls(
            hidden_size=hidden,
            intermediate_size=inner.size("intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=inner.size("num_key_value_heads", default=heads),
            head_dim=head_dim,
            rms_norm_eps=inner.number("rms_norm_eps", default=1e-6),
            rope=read_rope(
                inner,
                head_dim,
                inner.size("max_position_embeddings", default=2048),
                kinds=("default", "yarn", "llama3"),
            ),
            vocab_size=vocabulary,
            draft_vocab_size=hf.size("draft_vocab_size", default=vocabulary, maximum=vocabulary),
            target_hidden_size=hf.size("target_hidden_size", default=hidden),
            taps=_taps(hf if hf.value("eagle_aux_hidden_state_layer_ids") is not None else eagle, model),
            norm_before_residual=hf.flag("norm_before_residual", False),
            **norms,
        )
        check_heads(inner, heads, config.num_key_value_heads)
        if vocabulary != model.vocab_size:
            raise inner.error("vocab_size", f"is not the model's: {model.vocab_size}: give a head made for this model")
        if config.target_hidden_size != model.hidden_size:
            name = "hidden_size" if hf.value("target_hidden_size") is None else "target_hidden_size"
            holder = inner if name == "hidden_size" else hf
            raise holder.error(name, f"is not the model's: {model.hidden_size}: give a head made for this model")
        return config

    def check_parallel(self, attn_tp_size: int, lmhead_tp_size: int) -> None:
        """Raises UserError if a size does not divide the dimension that is split by it."""
        of = "of the head for drafts"
        check_even_split("attn_tp_size", attn_tp_size, f"num_attention_heads {of}", self.num_attention_heads)
        check_even_split("lmhead_tp_size", lmhead_tp_size, f"draft_vocab_size {of}", self.draft_vocab_size)
        check_kv_split(attn_tp_size, self.num_key_value_heads, f"num_key_value_heads {of}")


def _taps(holder: HfConfig, model: ModelConfig) -> tuple[int, ...]:
    """The layers before which a head reads hidden states. Files that begin with 1 have the layers after which it does:
    no head reads the states before layer 1, and none leaves out those before layer 2 (sgl-project/sglang #25454)."""
    name, depth = "eagle_aux_hidden_state_layer_ids", model.num_hidden_layers
    given = holder.sizes(name) or (2, depth // 2, depth - 3)
    taps = tuple(layer + 1 for layer in given) if given[0] == 1 else given
    if len(taps) != TAPS or sorted(set(taps)) != list(taps) or not 0 < taps[0] <= taps[-1] <= depth:
        raise holder.error(name, f"must be {TAPS} different layers of the model's {depth}, in order")
    return taps
