"""Finds the part of a GGUF file's tensors that each weight of a model is, by its family's table of names, and has the
names of layers that several families share."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from umbra.base.errors import UserError
from umbra.models.gguf.container import TensorInfo
from umbra.models.mtp_names import MtpNames

MOST_NAMES = 1 << 18  # several times those of the largest models
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
ROPE_DIVISORS = "rope_freqs.weight"  # of the frequencies, which config.json says
QUERIES_OR_KEYS = re.compile(r"\.self_attn\.[qk]_proj\.(?:weight|bias)$")
LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(ssm_a|[\w.]+\.(?:weight|bias|scale))")
FACTOR = ".scale"  # the last name of a tensor with a number for a whole matrix, or for each expert of a stack
# Parts of families' tables: the module of a layer's tensors `KEY.weight` and `KEY.bias`, or the path of a tensor `KEY`.
AFTER_ATTENTION = "post_attention_layernorm"
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": AFTER_ATTENTION}
NORMS_NAMED_BY_PLACE = {"attn_norm": "input_layernorm", "post_attention_norm": AFTER_ATTENTION}
ATTENTION = {
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
LATENT_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    **{f"attn_{x}_b": f"self_attn.{x}_b_proj" for x in ("kv", "k", "v")},
    "attn_output": "self_attn.o_proj",
}
DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
CHANNEL_DELTA_NET = {  # beside projections with attention's names
    **{f"ssm_conv1d_{x}": f"self_attn.{x}_conv1d" for x in "qkv"},
    **{f"ssm_{x}": f"self_attn.{x}_proj" for x in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
MLP = {f"ffn_{which}": f"mlp.{which}_proj" for which in ("gate", "up", "down")}
SELECTION_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}


def shared_expert(path: str) -> dict[str, str]:
    """The part of a table with the expert at `path` that every token takes."""
    return {f"ffn_{which}_shexp": f"{path}.{which}_proj" for which in ("gate", "up", "down")}


@dataclass(frozen=True)
class Names:
    """A family's table: the names of an architecture's tensors in its model."""

    tensors: Mapping[str, str]  # of each decoder layer, except experts
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    experts_at: str = "mlp.experts"
    fused: bool = False  # one weight has all experts
    plus_one: bool = False  # norms are stored with the one that the family's model adds
    mtp: MtpNames | None = None  # None: layers that predict further tokens are left out
    channels: bool = False  # each channel of keys has a decay of its own: rates are (1, 1, heads, 1)
    tiled: bool = False  # value heads of gated DeltaNet layers are in llama.cpp's order
    paired: bool = False  # so are rows of heads of queries and keys, those of a pair beside each other

    @property
    def written(self) -> dict[str, str]:
        """Returns the table by the model's names. The first of several names of one module is written."""
        return {module: name for name, module in reversed(list(self.tensors.items()))}

    @property
    def mtp_modules(self) -> dict[str, str]:
        """Returns the modules of the layer that predicts further tokens by their names after `nextn.`"""
        if not (mtp := self.mtp):
            return {}
        norms = {"enorm": mtp.embedding, "hnorm": mtp.hidden, "shared_head_norm": mtp.norm}
        return {**norms, "eh_proj": mtp.projection, "shared_head_head": mtp.head, "embed_tokens": "embed_tokens"}


@dataclass(frozen=True)
class Tiled:
    """Value heads of `size` rows, or columns, each, behind `first` others. The file has them in the order in which they
    share the key heads: 0, 1, 2 ..., 0, 1, 2 ...; the model has those of a key head together."""

    key_heads: int
    heads: int
    size: int
    first: int = 0

    def order(self, unit: int = 1) -> list[int]:
        """For each unit of the model's rows in turn, its number in the file."""
        per_key_head, units = self.heads // self.key_heads, self.size // unit
        heads = (head % per_key_head * self.key_heads + head // per_key_head for head in range(self.heads))
        first = self.first // unit
        return [*range(first), *(first + head * units + i for head in heads for i in range(units))]


@dataclass(frozen=True)
class Paired:
    """Heads of `size` rows each. The file has those that rotate together beside each other; the model has them half a
    head apart."""

    heads: int
    size: int

    def order(self, unit: int = 1) -> list[int]:
        """For each of the model's rows in turn, its number in the file."""
        firsts = range(0, self.heads * self.size, self.size)
        return [first + row for first in firsts for odd in (0, 1) for row in range(odd, self.size, 2)]


@dataclass(frozen=True)
class View:
    """A part of a tensor: all of it, or an expert of a stack, or some rows of that."""

    tensor: str
    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0
    rows: Tiled | Paired | None = None  # the order of its rows, if it is not the model's
    columns: Tiled | Paired | None = None  # that of its columns, or of a vector's elements
    change: str = ""  # one of `executor/checkpoint/formats/gguf.py`'s CHANGES that undoes what its values went through


def views_of(
    tensors: Mapping[str, TensorInfo],
    names: Names,
    predicting: range,
    where: str,
    tiled: Tiled | None = None,
    head_dim: int = 0,
) -> dict[str, View]:
    """Returns the view of each weight, by the model's name, and of factors of these, whose name ends with `FACTOR` in
    place of ".weight". Copies are left out, as are what the config says and tensors of the layers `predicting`, which
    predict further tokens, but for the first if the model has it; one that is unknown keeps its name. `tiled` is the
    order of value heads, behind queries and keys, if it is not the model's; heads of queries and keys have `head_dim`
    rows. Raises UserError, which `where` begins, for two tensors of one weight.
    """
    views: dict[str, View] = {}
    for tensor, info in tensors.items():
        if tensor == ROPE_DIVISORS or _is_factor(tensor, tensors):
            continue
        layer = LAYER.fullmatch(tensor)
        number = int(layer[1]) if layer else -1
        mtp = names.mtp if number in predicting[:1] else None
        if layer and (_is_copy(layer, tensors) or (number in predicting and mtp is None)):
            continue
        for ours, view in _with_factors(tensors, _views(tensor, info.shape, names, layer, mtp)):
            if ours in views:
                raise UserError(f"{where}: {tensor} and {views[ours].tensor} are two tensors of one weight, {ours}")
            if len(views) >= MOST_NAMES:
                raise UserError(f"{where}: {tensor}: more than {MOST_NAMES} weights")
            _, _, last = ours.partition(".linear_attn.")
            views[ours] = in_order(tiled, last, view) if tiled and last else view
            if names.paired and QUERIES_OR_KEYS.search(ours):
                views[ours] = in_pairs(head_dim, view)
    return views


def _is_factor(tensor: str, tensors: Mapping[str, TensorInfo]) -> bool:
    of = tensors.get(f"{tensor.removesuffix(FACTOR)}.weight") if tensor.endswith(FACTOR) else None
    return of is not None and of.kind == "NVFP4" and len(tensors[tensor].shape) == 1


def _with_factors(tensors: Mapping[str, TensorInfo], views: Iterable[tuple[str, View]]) -> Iterator[tuple[str, View]]:
    """The weights of a tensor, and the factor of each that has one."""
    for ours, view in views:
        yield ours, view
        factor = view.tensor.removesuffix(".weight") + FACTOR
        if factor in tensors and _is_factor(factor, tensors):
            shape = tensors[factor].shape
            expert = view.expert if shape != (1,) else None
            yield ours.removesuffix(".weight") + FACTOR, View(factor, shape if expert is None else (1,), expert)


def _is_copy(match: re.Match[str], tensors: Mapping[str, TensorInfo]) -> bool:
    """Returns whether another tensor has the same values: files for ik_llama.cpp have keys and values together and
    apart."""
    layer, rest = match.groups()
    return rest in ("attn_k_b.weight", "attn_v_b.weight") and f"blk.{layer}.attn_kv_b.weight" in tensors


def in_order(tiled: Tiled, last: str, view: View) -> View:
    """The view of the tensor of a gated DeltaNet layer with these last names."""
    alone = replace(tiled, first=0)
    numbers = replace(alone, size=1)
    rows = {
        "in_proj_qkv.weight": tiled,
        "conv1d.weight": tiled,
        "in_proj_z.weight": alone,
        "in_proj_b.weight": numbers,
        "in_proj_a.weight": numbers,
    }
    columns = {"out_proj.weight": alone, "A_log": numbers, "dt_bias": numbers}
    return replace(view, rows=rows.get(last), columns=columns.get(last))


def in_pairs(head_dim: int, view: View) -> View:
    """The view of a projection to queries or keys, or of its bias, with the rows of each head in the file's order."""
    order = Paired(view.shape[0] // head_dim, head_dim)
    return replace(view, rows=order) if len(view.shape) > 1 else replace(view, columns=order)


def _views(
    tensor: str, shape: tuple[int, ...], names: Names, in_layer: re.Match[str] | None, mtp: MtpNames | None
) -> Iterator[tuple[str, View]]:
    if in_layer is None:
        change = "minus_one" if names.plus_one and tensor == "output_norm.weight" else ""
        yield WHOLE.get(tensor, tensor), View(tensor, shape, change=change)
        return
    layer, rest = in_layer.groups()
    stem, _, ending = rest.rpartition(".")
    path = f"{mtp.path.format(layer)}." if mtp else f"model.layers.{layer}."
    at = f"{path}{mtp.layer}." if mtp and mtp.layer else path
    which = stem.removeprefix("ffn_").removesuffix("_exps")
    if stem.endswith("_exps") and len(shape) >= 2 and which in ("gate", "up", "down", "gate_up"):
        yield from _stack(View(tensor, shape), f"{at}{names.experts_at}.", which, ending, names)
    elif rest in names.tensors:
        if names.channels and rest == "ssm_a":  # tools drop dimensions of one
            shape = 1, 1, prod(shape), 1
        yield at + names.tensors[rest], View(tensor, shape, change="logarithm" if rest == "ssm_a" else "")
    elif mtp and (own := names.mtp_modules.get(stem.removeprefix("nextn."))):
        change = "minus_one" if names.plus_one and stem.endswith("norm") else ""
        yield f"{path}{own}.{ending}", View(tensor, shape, change=change)
    elif module := names.tensors.get(stem):
        if stem == "ffn_gate_inp_shexp":  # a matrix of one row
            shape = 1, *shape
        elif stem.startswith("ssm_conv1d"):  # whose channels are groups of one
            shape = prod(shape[:-1]), 1, *shape[-1:]
        change = "minus_one" if names.plus_one and stem.endswith("norm") and stem != "ssm_norm" else ""
        yield f"{at}{module}.{ending}", View(tensor, shape, change=change)
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
