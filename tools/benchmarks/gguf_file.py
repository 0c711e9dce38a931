"""Writes a loaded model as a GGUF file for llama.cpp, with exactly the same values.

The formats agree: q4 is Q4_0 and q8 is Q8_0, 32 columns of (quant - zero) * scale with a float16 scale, and mxfp4 is
MXFP4, 32 e2m1 floats with a power of two. Only the order of the bytes differs, so the blocks are made from the
dequantised values, whatever their layout in memory: the scale is derived from a block's largest value, and a check
proves that scale and quants give back every value exactly.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from umbra.base.errors import UserError
from umbra.models.causal_lm import CausalLM
from umbra.models.deepseek.config import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, LatentMoeConfig
from umbra.models.glm4_moe.config import Glm4MoeConfig
from umbra.models.gpt_oss.config import GptOssConfig
from umbra.models.minimax_m2.config import MiniMaxM2Config
from umbra.models.qwen3_5_moe.config import Qwen3_5MoeConfig
from umbra.models.qwen3_moe.config import Qwen3MoeConfig
from umbra.models.qwen3_next.config import Qwen3NextConfig
from umbra.ops.format import E2M1
from umbra.tools.benchmarks.gguf_entries import Config, Entry, entries

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
GROUP = 32
PART = 256  # rows
ARCHITECTURES = {
    Qwen3MoeConfig: "qwen3moe",
    MiniMaxM2Config: "minimax-m2",
    GptOssConfig: "gpt-oss",
    Glm4MoeConfig: "glm4moe",
    Qwen3NextConfig: "qwen3next",
    Qwen3_5MoeConfig: "qwen35moe",
} | dict.fromkeys((DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig), "deepseek2")
TYPES = {"q4": "Q4_0", "q8": "Q8_0", "mxfp4": "MXFP4", "bfloat16": "BF16", "float16": "F16", "float32": "F32"}


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
        describe_shared(writer, config)
    elif isinstance(config, LatentMoeConfig):
        describe_latents(writer, config)
    elif isinstance(config, Qwen3NextConfig | Qwen3_5MoeConfig):
        every = (*config.linear_layers, False).index(False) + 1
        if any(linear != bool((i + 1) % every) for i, linear in enumerate(config.linear_layers)):
            raise UserError("GGUF: layer_types that do not repeat are not written")
        if not config.norm_topk_prob:
            raise UserError("GGUF: norm_topk_prob: false is not written")
        writer.add_full_attention_interval(every)
        writer.add_expert_shared_feed_forward_length(config.shared_width)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        if isinstance(config, Qwen3_5MoeConfig):
            writer.add_rope_dimension_sections([11, 11, 10, 0])
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
    latent = config.kv_lora_rank if isinstance(config, LatentMoeConfig) else 0
    writer.add_key_length(latent + config.head_dim)
    writer.add_value_length(latent or config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.rope.dim)
    writer.add_expert_count(config.expert_count)
    writer.add_expert_used_count(config.experts_per_token)


def describe_shared(writer: Any, config: Glm4MoeConfig | LatentMoeConfig) -> None:
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_leading_dense_block_count(0)


def describe_latents(writer: Any, config: LatentMoeConfig) -> None:
    from gguf import ExpertGatingFuncType

    if config.n_group > 1 or not all(config.sparse_layers):
        raise UserError("GGUF: n_group and dense layers of models with latents are not written")
    writer.add_expert_gating_func(ExpertGatingFuncType[config.scoring.upper()])
    describe_shared(writer, config)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    if config.rope.yarn:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope.yarn.mscale_all_dim)


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
