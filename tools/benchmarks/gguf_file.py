"""Writes a loaded model as a GGUF file for llama.cpp, with exactly the same values.

The formats agree: q4 is Q4_0 and q8 is Q8_0, 32 columns of (quant - zero) * scale with a float16 scale. Only the order
of the bytes differs, so the blocks are made from the dequantised values, whatever their layout in memory: the scale is
derived from a block's largest value, and a check proves that scale and quants give back every value exactly.

Rows are in the checkpoint's order, because llama.cpp rotates halves ("neox") in these architectures, as the checkpoint
does.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from models.causal_lm import CausalLM
from models.minimax_m2.config import MiniMaxM2Config
from models.qwen3_moe.config import Qwen3MoeConfig
from umbra.errors import UserError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Order = tuple[int, ...] | None  # of rows in a head (models/layers/rotary.py); None: as in the checkpoint
GROUP = 32
PART = 256  # rows
Config = Qwen3MoeConfig | MiniMaxM2Config
TYPES = {"q4": "Q4_0", "q8": "Q8_0", "bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Entry:
    """A tensor of the file; `read` yields its matrix, or those of all experts, in float32 or its own type."""

    name: str
    shape: tuple[int, ...]
    format: str
    read: Callable[[], Iterator[Tensor]]


def encoded(values: Tensor, format: str) -> Bytes:
    """(rows, columns) -> (rows, bytes of a row)"""
    if format in ("q4", "q8"):  # in parts that fit the caches
        return np.concatenate([_blocks(part.numpy(), format) for part in values.split(PART)])
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


def as_in_checkpoint(rows: Tensor, order: Order) -> Tensor:
    """`rows`, or the elements of a vector, of which each head's are in `order`, as in the checkpoint."""
    if order is None:
        return rows
    return rows.unflatten(0, (-1, len(order)))[:, torch.tensor(order).argsort()].flatten(0, 1)


def entries(model: CausalLM, config: Config, format: str) -> Iterator[Entry]:
    """Every tensor by llama.cpp's name; matrices in `format`, except the output head in q8."""
    hidden = config.hidden_size

    def plain(name: str, weight: Tensor, order: Order = None) -> Entry:
        format = str(weight.dtype).removeprefix("torch.")
        return Entry(name, tuple(weight.shape), format, lambda: iter([as_in_checkpoint(weight, order)]))

    def matrix(name: str, weight: Any, format: str, part: slice | None = None, order: Order = None) -> Entry:
        """Rows `part` of a NativeMatrix."""
        part = part or slice(0, weight.rows)
        rows = part.stop - part.start

        def read() -> Iterator[Tensor]:
            yield as_in_checkpoint(weight.packed.dequantised(0, rows, part.start), order)

        return Entry(name, (rows, weight.columns), format, read)

    def experts(name: str, weights: Any, which: str) -> Entry:
        rows, columns = (hidden, weights.inner) if which == "down" else (weights.inner, hidden)
        shape = weights.count, rows, columns
        return Entry(name, shape, format, lambda: (weights.dequantised(e, which) for e in range(weights.count)))

    yield plain("token_embd.weight", model.model.embed_tokens.table)
    yield plain("output_norm.weight", model.model.norm.weight)
    yield matrix("output.weight", model.lm_head.weight, "q8")
    layers: Any = model.model.layers
    for i, layer in enumerate(layers):
        attention = layer.self_attn
        yield plain(f"blk.{i}.attn_norm.weight", layer.input_layernorm.weight)
        yield plain(f"blk.{i}.ffn_norm.weight", layer.post_attention_layernorm.weight)
        start = 0
        for name, source in zip("qkv", attention.qkv_proj.sources, strict=True):
            part = slice(start, start + source.kept)
            yield matrix(f"blk.{i}.attn_{name}.weight", attention.qkv_proj.weight, format, part, source.order)
            start += source.kept
        if isinstance(config, MiniMaxM2Config):
            moe = layer.block_sparse_moe
            yield plain(f"blk.{i}.exp_probs_b.bias", moe.e_score_correction_bias.values)
            for name, source, weight in zip("qk", attention.qk_norm.sources, attention.qk_norm.weights, strict=True):
                yield plain(f"blk.{i}.attn_{name}_norm.weight", weight, source.order)
        else:
            moe = layer.mlp
            yield plain(f"blk.{i}.attn_q_norm.weight", attention.q_norm.weight)
            yield plain(f"blk.{i}.attn_k_norm.weight", attention.k_norm.weight)
        yield matrix(f"blk.{i}.attn_output.weight", attention.o_proj.weight, format)
        yield matrix(f"blk.{i}.ffn_gate_inp.weight", moe.gate.weight, "float32")  # llama.cpp accepts no other type
        for which in ("gate", "up", "down"):
            yield experts(f"blk.{i}.ffn_{which}_exps.weight", moe.experts.weights, which)


def write_gguf(path: Path, model: CausalLM, config: Config, format: str, tokenizer: Path | None = None) -> None:
    """Write the file tensor by tensor; at most one tensor is held in memory besides the model. `tokenizer` is a folder
    with the tokenizer's files; without one the file has none."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, "minimax-m2" if isinstance(config, MiniMaxM2Config) else "qwen3moe")
    describe(writer, config)
    if tokenizer:
        describe_tokenizer(writer, tokenizer)
    else:
        writer.add_tokenizer_model("no_vocab")
    tensors = list(entries(model, config, format))
    for entry in tensors:
        kind = GGMLQuantizationType[TYPES[entry.format]]
        columns, size = GGML_QUANT_SIZES[kind]
        nbytes = int(np.prod(entry.shape)) // columns * size
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), nbytes, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in tqdm(tensors, desc="writing GGUF", unit="tensor", disable=None, leave=False):
            writer.write_tensor_data(np.stack([encoded(m.view(-1, m.shape[-1]), entry.format) for m in entry.read()]))
        writer.close()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def describe(writer: Any, config: Config) -> None:
    """Write the metadata that llama.cpp requires for this architecture, other than the tokenizer's."""
    from gguf import ExpertGatingFuncType

    if config.rope.yarn or config.tie_word_embeddings:
        raise UserError("GGUF: YaRN and tied embeddings are not written")
    if isinstance(config, MiniMaxM2Config):
        if not config.use_routing_bias:
            raise UserError("GGUF: llama.cpp has no minimax-m2 with use_routing_bias: false")
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    else:
        if config.attention_bias or not config.norm_topk_prob:
            raise UserError("GGUF: biases and norm_topk_prob: false are not written")
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
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
