"""Which part of which tensor of a GGUF file each weight of the model is."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from models.gguf.container import TensorInfo
from umbra.errors import UserError

MOST_NAMES = 1 << 18  # several times those of the largest models
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([\w.]+)\.(weight|bias)")
# The module of a layer's tensors `NAME.weight` and `NAME.bias`; MOE is its mixture of experts.
MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{which}": f"mlp.{which}_proj" for which in ("gate", "up", "down")},
    **{f"ffn_{which}_shexp": f"MOE.SHARED.{which}_proj" for which in ("gate", "up", "down")},
    "ffn_gate_inp": "MOE.ROUTER",
    "ffn_gate_inp_shexp": "MOE.shared_expert_gate",
}
NAMELESS = {"attn_sinks.weight": "self_attn.sinks"}  # tensors of modules whose path is their name


@dataclass(frozen=True)
class Names:
    """What an architecture's modules are called in its family's model."""

    moe: str = "mlp"
    router: str = "gate"
    shared: str = "shared_expert"
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: bool = False  # one weight has all experts
    selection_bias: str = "mlp.gate.e_score_correction_bias"


@dataclass(frozen=True)
class View:
    """A part of a tensor: all of it, or an expert of a stack, or some rows of that."""

    tensor: str
    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0


def views_of(tensors: Mapping[str, TensorInfo], names: Names, predicting: range, where: str) -> dict[str, View]:
    """The view of each weight, by the model's name. Tensors of the layers `predicting`, which predict further tokens,
    are left out; one that is unknown keeps its name. Raises UserError, which `where` begins, for two tensors of one
    weight."""
    views: dict[str, View] = {}
    for tensor, info in tensors.items():
        found = LAYER.fullmatch(tensor)
        if found and int(found[1]) in predicting:
            continue
        for ours, view in _views(tensor, info.shape, names, found):
            if ours in views:
                raise UserError(f"{where}: {tensor} and {views[ours].tensor} are two tensors of one weight, {ours}")
            if len(views) >= MOST_NAMES:
                raise UserError(f"{where}: {tensor}: more than {MOST_NAMES} weights")
            views[ours] = view
    return views


def _views(
    tensor: str, shape: tuple[int, ...], names: Names, found: re.Match[str] | None
) -> Iterator[tuple[str, View]]:
    if found is None:
        yield WHOLE.get(tensor, tensor), View(tensor, shape)
        return
    layer, stem, ending = found.groups()
    at = f"model.layers.{layer}."
    which = stem.removeprefix("ffn_").removesuffix("_exps")
    if stem.endswith("_exps") and len(shape) >= 2 and which in ("gate", "up", "down", "gate_up"):
        yield from _stack(View(tensor, shape), f"{at}{names.moe}.experts.", which, ending, names)
    elif f"{stem}.{ending}" in NAMELESS:
        yield at + NAMELESS[f"{stem}.{ending}"], View(tensor, shape)
    elif f"{stem}.{ending}" == "exp_probs_b.bias":
        yield at + names.selection_bias, View(tensor, shape)
    elif module := MODULES.get(stem):
        module = module.replace("MOE", names.moe).replace("ROUTER", names.router).replace("SHARED", names.shared)
        shape = (1, *shape) if stem == "ffn_gate_inp_shexp" else shape  # a matrix of one row
        yield f"{at}{module}.{ending}", View(tensor, shape)
    else:
        yield tensor, View(tensor, shape)


def _stack(whole: View, at: str, which: str, ending: str, names: Names) -> Iterator[tuple[str, View]]:
    ours = dict(zip(("gate", "up", "down"), names.experts, strict=True))
    if names.fused and which != "gate_up":
        yield f"{at}{ours[which]}{'_bias' if ending == 'bias' else ''}", whole
        return
    count, rows, *columns = whole.shape
    for expert in range(count):
        if which == "gate_up":  # the rows of the gate before those of up
            for part, half in enumerate(("gate", "up")):
                view = View(whole.tensor, (rows // 2, *columns), expert, part * (rows // 2))
                yield f"{at}{expert}.{ours[half]}.{ending}", view
        else:
            yield f"{at}{expert}.{ours[which]}.{ending}", View(whole.tensor, (rows, *columns), expert)
