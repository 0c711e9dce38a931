"""Writes a loaded model as a GGUF file for llama.cpp, with exactly the same values.

The formats agree: q4 is Q4_0 and q8 is Q8_0, 32 columns of (quant - zero) * scale with a float16 scale, and mxfp4 is
MXFP4, 32 e2m1 floats with a power of two. Only the order of the bytes differs, so the blocks are made from the
dequantised values, whatever their layout in memory: the scale is derived from a block's largest value, and a check
proves that scale and quants give back every value exactly.

Rows are in the checkpoint's order, because llama.cpp rotates halves ("neox") in these architectures, as the checkpoint
does.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from models.causal_lm import CausalLM
from models.glm4_moe.config import Glm4MoeConfig
from models.gpt_oss.config import GptOssConfig
from models.minimax_m2.config import MiniMaxM2Config
from models.qwen3_moe.config import Qwen3MoeConfig
from ops.cpu.matrix import ROWS
from ops.format import E2M1
from umbra.errors import UserError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Order = tuple[int, ...] | None  # of rows in a head (models/layers/rotary.py); None: as in the checkpoint
GROUP = 32
PART = 256  # rows
Config = Qwen3MoeConfig | MiniMaxM2Config | GptOssConfig | Glm4MoeConfig
ARCHITECTURES = {
    Qwen3MoeConfig: "qwen3moe", MiniMaxM2Config: "minimax-m2", GptOssConfig: "gpt-oss", Glm4MoeConfig: "glm4moe"
}  # fmt: skip
TYPES = {"q4": "Q4_0", "q8": "Q8_0", "mxfp4": "MXFP4", "bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Entry:
    """A tensor of the file; `read` yields its matrix, or those of all experts, in float32 or its own type."""

    name: str
    shape: tuple[int, ...]
    format: str
    read: Callable[[], Iterator[Tensor]]


def encoded(values: Tensor, format: str) -> Bytes:
    """(rows, columns) -> (rows, bytes of a row)"""
    if format in ("q4", "q8", "mxfp4"):  # in parts that fit the caches
        blocks = _mxfp4_blocks if format == "mxfp4" else partial(_blocks, format=format)
        return np.concatenate([blocks(part.numpy()) for part in values.split(PART)])
    return values.to(getattr(torch, format)).contiguous().view(torch.uint8).numpy()


def _blocks(values: np.ndarray[Any, np.dtype[np.float32]], format: str) -> Bytes:
    blocks = values.reshape(-1, GROUP)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)  # (blocks, 1), signed
    scale = (largest / -8 if format == "q4" else np.abs(largest) / 127).astype(np.float16)
    wide = scale.astype(np.float32)
    quants = np.rint(blocks / np.where(wide == 0, 1, wide)).astype(np.int8)
    if not np.array_equal(quants * wide, blocks):
        raise ValueError(f"the values are not those of a {format} matrix")  # a bug here or in the engine
    if format == "q4":  # column i in the low nibble of byte i, column 16 + i in the high one
        nibbles = (quants + 8).view(np.uint8)
        quants = (nibbles[:, :16] | nibbles[:, 16:] << 4).view(np.int8)
    return np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], axis=1).reshape(len(values), -1)


def _mxfp4_blocks(values: np.ndarray[Any, np.dtype[np.float32]]) -> Bytes:
    blocks = values.reshape(-1, GROUP)
    largest = np.abs(blocks).max(1, keepdims=True)
    exponent = np.clip(np.frexp(largest)[1] + 124, 0, 254)  # the largest is 4 or 6 times 2^(exponent - 127)
    scaled = np.ldexp(blocks, 127 - exponent)
    codes = np.searchsorted(np.array(E2M1[:8], np.float32), np.abs(scaled)).astype(np.uint8)
    if not np.array_equal(np.array(E2M1, np.float32)[codes], np.abs(scaled)):
        raise ValueError("the values are not those of a mxfp4 matrix")  # a bug here or in the engine
    codes |= np.signbit(scaled).astype(np.uint8) << 3
    packed = codes[:, :16] | codes[:, 16:] << 4
    return np.concatenate([exponent.astype(np.uint8), packed], axis=1).reshape(len(values), -1)


def as_in_checkpoint(rows: Tensor, order: Order) -> Tensor:
    """`rows`, or the elements of a vector, of which each head's are in `order`, as in the checkpoint."""
    if order is None:
        return rows
    return rows.unflatten(0, (-1, len(order)))[:, torch.tensor(order).argsort()].flatten(0, 1)


def entries(model: CausalLM, config: Config) -> Iterator[Entry]:
    """Every tensor by llama.cpp's name, matrices in the format that they are kept in."""
    hidden = config.hidden_size

    def plain(name: str, weight: Tensor, order: Order = None) -> Entry:
        format = str(weight.dtype).removeprefix("torch.")
        return Entry(name, tuple(weight.shape), format, lambda: iter([as_in_checkpoint(weight, order)]))

    def matrix(
        name: str, weight: Any, part: slice | None = None, order: Order = None, format: str | None = None
    ) -> Entry:
        """Rows `part` of a NativeMatrix."""
        part, format = part or slice(0, weight.rows), format or weight.packed.format.kind
        rows = part.stop - part.start

        def read() -> Iterator[Tensor]:
            yield as_in_checkpoint(weight.packed.dequantised(0, rows, part.start), order)

        return Entry(name, (rows, weight.columns), format, read)

    def experts(name: str, weights: Any, which: str) -> Entry:
        rows, columns = (hidden, weights.inner) if which == "down" else (weights.inner, hidden)
        shape = weights.count, rows, columns
        kind = weights.w13.format.kind
        return Entry(name, shape, kind, lambda: (weights.dequantised(e, which) for e in range(weights.count)))

    def biases(name: str, weights: Any, which: str) -> Entry:
        (of_all,) = (weights.w2 if which == "down" else weights.w13).biases  # on one NUMA node
        bias = of_all[:, :hidden]
        if which != "down":  # sixteen rows of gate, sixteen of up, in turn
            bias = of_all.view(weights.count, -1, 2, ROWS)[:, :, int(which == "up")].flatten(1)
        return plain(name, bias.contiguous())

    table: Any = model.model.embed_tokens.table
    yield plain("token_embd.weight", table)
    yield plain("output_norm.weight", model.model.norm.weight)
    yield matrix("output.weight", model.lm_head.weight)
    after = "post_attention" if isinstance(config, (GptOssConfig, Glm4MoeConfig)) else "ffn"
    layers: Any = model.model.layers
    for i, layer in enumerate(layers):
        attention = layer.self_attn
        yield plain(f"blk.{i}.attn_norm.weight", layer.input_layernorm.weight)
        yield plain(f"blk.{i}.{after}_norm.weight", layer.post_attention_layernorm.weight)
        start = 0
        for name, source in zip("qkv", attention.qkv_proj.sources, strict=True):
            part = slice(start, start + source.kept)
            yield matrix(f"blk.{i}.attn_{name}.weight", attention.qkv_proj.weight, part, source.order)
            if attention.qkv_proj.bias is not None:
                yield plain(f"blk.{i}.attn_{name}.bias", attention.qkv_proj.bias[part], source.order)
            start += source.kept
        if isinstance(config, MiniMaxM2Config):
            moe = layer.block_sparse_moe
            yield plain(f"blk.{i}.exp_probs_b.bias", moe.e_score_correction_bias.values)
            for name, source, weight in zip("qk", attention.qk_norm.sources, attention.qk_norm.weights, strict=True):
                yield plain(f"blk.{i}.attn_{name}_norm.weight", weight, source.order)
        elif isinstance(config, GptOssConfig):
            moe = layer.mlp
            yield plain(f"blk.{i}.attn_sinks.weight", attention.sinks.values)
            yield plain(f"blk.{i}.attn_output.bias", attention.o_proj.bias)
            yield plain(f"blk.{i}.ffn_gate_inp.bias", moe.router.score_bias)
            for which in ("gate", "up", "down"):
                yield biases(f"blk.{i}.ffn_{which}_exps.bias", moe.experts.weights, which)
        elif isinstance(config, Glm4MoeConfig):
            moe, width = layer.mlp, config.shared_width
            yield plain(f"blk.{i}.exp_probs_b.bias", moe.gate.bias)
            both = moe.shared_experts.gate_up_proj.weight
            yield matrix(f"blk.{i}.ffn_gate_shexp.weight", both, slice(0, width))
            yield matrix(f"blk.{i}.ffn_up_shexp.weight", both, slice(width, 2 * width))
            yield matrix(f"blk.{i}.ffn_down_shexp.weight", moe.shared_experts.down_proj.weight)
        else:
            moe = layer.mlp
            yield plain(f"blk.{i}.attn_q_norm.weight", attention.q_norm.weight)
            yield plain(f"blk.{i}.attn_k_norm.weight", attention.k_norm.weight)
        yield matrix(f"blk.{i}.attn_output.weight", attention.o_proj.weight)
        router = moe.router if isinstance(config, GptOssConfig) else moe.gate
        yield matrix(f"blk.{i}.ffn_gate_inp.weight", router.weight, format="float32")  # llama.cpp accepts no other type
        for which in ("gate", "up", "down"):
            yield experts(f"blk.{i}.ffn_{which}_exps.weight", moe.experts.weights, which)


@dataclass(frozen=True)
class Content:
    """A tensor of the file by the name of its type in GGUF; `make` makes its blocks."""

    name: str
    shape: tuple[int, ...]
    kind: str
    make: Callable[[], Bytes]


def write_gguf(path: Path, model: CausalLM, config: Config, tokenizer: Path | None = None) -> None:
    """Writes the model's own values; at most one tensor is held in memory besides the model."""

    def blocks(entry: Entry) -> Bytes:
        return np.stack([encoded(m.view(-1, m.shape[-1]), entry.format) for m in entry.read()])

    contents = [Content(e.name, e.shape, TYPES[e.format], partial(blocks, e)) for e in entries(model, config)]
    write_tensors(path, config, contents, tokenizer)


def write_tensors(path: Path, config: Config, contents: list[Content], tokenizer: Path | None = None) -> None:
    """Writes the file tensor by tensor. `tokenizer` is a folder with the tokenizer's files; without one the file has
    none."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURES[type(config)])
    describe(writer, config)
    if tokenizer:
        describe_tokenizer(writer, tokenizer)
    else:
        writer.add_tokenizer_model("no_vocab")
    for content in contents:
        kind = GGMLQuantizationType[content.kind]
        columns, size = GGML_QUANT_SIZES[kind]
        nbytes = int(np.prod(content.shape)) // columns * size
        writer.add_tensor_info(content.name, content.shape, np.dtype(np.float32), nbytes, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for content in tqdm(contents, desc="writing GGUF", unit="tensor", disable=None, leave=False):
            writer.write_tensor_data(content.make())
        writer.close()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def describe(writer: Any, config: Config) -> None:
    """Write the metadata that llama.cpp requires for this architecture, other than the tokenizer's."""
    from gguf import ExpertGatingFuncType, RopeScalingType

    if config.tie_word_embeddings:
        raise UserError("GGUF: tied embeddings are not written")
    if yarn := config.rope.yarn:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(yarn.factor)
        writer.add_rope_scaling_orig_ctx_len(yarn.original_length)
    if isinstance(config, MiniMaxM2Config):
        if not config.use_routing_bias:
            raise UserError("GGUF: llama.cpp has no minimax-m2 with use_routing_bias: false")
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    elif isinstance(config, GptOssConfig):
        writer.add_sliding_window(config.sliding_window)
    elif isinstance(config, Glm4MoeConfig):
        if config.use_qk_norm or not all(config.sparse_layers):
            raise UserError("GGUF: use_qk_norm and dense layers of glm4_moe are not written")
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_leading_dense_block_count(0)
    else:
        if config.attention_bias or not config.norm_topk_prob:
            raise UserError("GGUF: biases and norm_topk_prob: false are not written")
    inner = config.intermediate_size if isinstance(config, MiniMaxM2Config) else config.moe_intermediate_size
    writer.add_expert_feed_forward_length(inner)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.rope.dim)
    writer.add_expert_count(config.expert_count)
    writer.add_expert_used_count(config.experts_per_token)


def describe_tokenizer(writer: Any, folder: Path) -> None:
    """Write a byte-level BPE tokenizer that splits text as Qwen's does, whose ids have no gaps."""
    from gguf import TokenType

    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in data["added_tokens"]}
    ids = {id: text for text, id in data["model"]["vocab"].items()} | {id: t["content"] for id, t in added.items()}
    special = {id for id, token in added.items() if token["special"]}
    kinds = [TokenType.CONTROL if id in special else TokenType.NORMAL for id in range(len(ids))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([ids[id] for id in range(len(ids))])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    writer.add_eos_token_id(next(id for id, text in ids.items() if text == settings["eos_token"]))
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))
