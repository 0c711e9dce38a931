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
from umbra.models.config import ModelConfig
from umbra.models.gguf.architecture import Architecture
from umbra.models.registry import conventions
from umbra.ops.formats.mxfp4 import E2M1
from umbra.text.splits import Split
from umbra.text.tokenizer_file import patterns
from umbra.tools.benchmarks.gguf_entries import Entry, architecture_of, entries

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
GROUP = 32
PART = 256  # rows
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


def write_gguf(path: Path, model: CausalLM, config: ModelConfig, tokenizer: Path | None = None) -> None:
    """Writes the model's own values; at most one tensor is held in memory besides the model."""

    def blocks(entry: Entry) -> Bytes:
        return np.stack([encoded(m.view(-1, m.shape[-1]), entry.format) for m in entry.read()])

    contents = [Content(e.name, e.shape, TYPES[e.format], partial(blocks, e)) for e in entries(model, config)]
    write_tensors(path, config, contents, tokenizer)


def write_tensors(path: Path, config: ModelConfig, contents: list[Content], tokenizer: Path | None = None) -> None:
    """Writes the file tensor by tensor. `tokenizer` is a folder with the tokenizer's files; without one the file has
    none."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    architecture = architecture_of(config)
    writer = GGUFWriter(path, architecture.name)
    describe(writer, architecture, config)
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


def describe(writer: Any, architecture: Architecture, config: Any) -> None:
    """Writes the metadata that llama.cpp requires for this architecture, other than the tokenizer's."""
    if config.tie_word_embeddings:
        raise UserError("GGUF: tied embeddings are not written")
    keys: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.rope.dim,
    }
    if config.expert_count:
        keys |= {"expert_count": config.expert_count, "expert_used_count": config.experts_per_token}
        keys["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", 0)
    if yarn := config.rope.yarn:
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(yarn.factor)}
        keys |= {"rope.scaling.original_context_length": yarn.original_length}
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    for key, value in (keys | architecture.write(config)).items():
        add[type(value)](f"{architecture.name}.{key}", value)


def describe_tokenizer(writer: Any, folder: Path) -> None:
    """Writes a byte-level BPE tokenizer whose ids have no gaps, and which splits text as a family's does."""
    from gguf import TokenType

    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in data["added_tokens"]}
    ids = {id: text for text, id in data["model"]["vocab"].items()} | {id: t["content"] for id, t in added.items()}
    special = {id for id, token in added.items() if token["special"]}
    kinds = [TokenType.CONTROL if id in special else TokenType.NORMAL for id in range(len(ids))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_of(folder, data))
    writer.add_token_list([ids[id] for id in range(len(ids))])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    writer.add_eos_token_id(next(id for id, text in ids.items() if text == settings["eos_token"]))
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def split_of(folder: Path, tokenizer: dict[str, Any]) -> str:
    """Returns llama.cpp's name of the split of a tokenizer.json, whose contents are given, in `folder`."""
    used, composed = tuple(patterns(tokenizer["pre_tokenizer"])), tokenizer["normalizer"] == {"type": "NFC"}
    wanted = Split(used, tokenizer["model"].get("ignore_merges", False), composed)
    name = next((name for name, split in conventions().splits.items() if split == wanted), None)
    if name is None:
        raise UserError(f"{folder / 'tokenizer.json'}: GGUF: no family's tokenizer splits texts as this one: {used}")
    return name
