"""The GGUF files of dense decoders. Those of `llama` have Llama's and Mistral's models alike."""

from typing import Any

from umbra.base.errors import UserError
from umbra.models.dense.config import DenseModelConfig
from umbra.models.gguf.architecture import Architecture
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.names import ATTENTION, MLP, NORMS, Names

TABLE = {**NORMS, **ATTENTION, **MLP}
SCALE, CANCELS = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"


def read(keys: Keys) -> dict[str, Any]:
    return {"intermediate_size": keys.size("feed_forward_length"), "attention_bias": keys.has("blk.0.attn_output.bias")}


def read_qwen2(keys: Keys) -> dict[str, Any]:
    return {"intermediate_size": keys.size("feed_forward_length")}


def read_mistral3(keys: Keys) -> dict[str, Any]:
    """Files without a scale of queries are Mistral's. Where the multiplier is set, YaRN scales no scores."""
    if keys.all.value(f"{keys.name}.{SCALE}") is None:
        return {**read(keys), "model_type": "mistral", "sliding_window": None}
    scaling = {**(keys.scaling() or {}), "llama_4_scaling_beta": keys.number(SCALE)}
    if keys.all.value(f"{keys.name}.{CANCELS}"):
        scaling["attention_factor"] = 1.0
    return {**read(keys), "rope_scaling": scaling}


def write(config: DenseModelConfig) -> dict[str, Any]:
    if any(config.sliding_layers) or config.out_bias or config.mlp_bias:
        raise UserError("GGUF: windows, and biases other than those of queries, keys and values, are not written")
    return {}


def write_mistral3(config: DenseModelConfig) -> dict[str, Any]:
    return {SCALE: config.rope.query_beta, CANCELS: 1.0, **write(config)}


QWEN3_FILES = Architecture("qwen3", Names(TABLE), (), read, write)
QWEN2_FILES = Architecture("qwen2", Names(TABLE), (), read_qwen2, write)
LLAMA_FILES = Architecture("llama", Names(TABLE, paired=True), (), read, write)
MISTRAL3_FILES = Architecture("mistral3", Names(TABLE, paired=True), (), read_mistral3, write_mistral3)
