"""GGUF files: their header, and the config, names and tokenizer that it stands for."""

import struct
from pathlib import Path

from tests.fuzz.target import Target
from umbra.models.gguf.container import read_gguf
from umbra.models.gguf.folder import files_of
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.metadata import architecture_of, value_heads
from umbra.models.gguf.names import views_of
from umbra.models.registry import architectures

TEXT, LIST = 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value: object) -> bytes:
    """A value with its type."""
    if isinstance(value, list):
        parts = [typed(part) for part in value] or [struct.pack("<I", TEXT)]
        return (
            struct.pack("<I", LIST)
            + parts[0][:4]
            + struct.pack("<Q", len(value))
            + b"".join(p[4:] for p in parts if value)
        )
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + text(value)
    kind, code = (7, "?") if isinstance(value, bool) else (4, "I") if isinstance(value, int) else (6, "f")
    return struct.pack(f"<I{code}", kind, value)


def file(keys: dict[str, object], tensors: dict[str, tuple[int, ...]]) -> bytes:
    """A file with these keys, and tensors of float32 with these shapes."""
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    data += b"".join(text(key) + typed(value) for key, value in keys.items())
    offset = 0
    for name, (rows, columns) in tensors.items():
        data += text(name) + struct.pack("<IQQIQ", 2, columns, rows, 0, offset)
        offset += -(-rows * columns * 4 // 32) * 32
    return data + bytes(-len(data) % 32 + offset)


def model(architecture: str, **more: object) -> bytes:
    sizes = dict.fromkeys(
        (
            "block_count",
            "embedding_length",
            "feed_forward_length",
            "expert_feed_forward_length",
            "expert_count",
            "expert_used_count",
            "expert_shared_count",
            "attention.head_count",
            "attention.sliding_window",
            "expert_shared_feed_forward_length",
            "ssm.group_count",
            "ssm.time_step_rank",
            "ssm.inner_size",
            "ssm.state_size",
            "ssm.conv_kernel",
        ),
        2,
    )
    keys: dict[str, object] = {"general.architecture": architecture, f"{architecture}.context_length": 64}
    keys |= {f"{architecture}.{key}": value for key, value in sizes.items()}
    keys |= {f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6, f"{architecture}.rope.freq_base": 1e4}
    return file(keys | more, {"token_embd.weight": (4, 2), "blk.0.ffn_up_exps.weight": (2, 2)})


def latent(more: dict[str, object]) -> bytes:
    """A deepseek2 with these keys."""
    keys = dict.fromkeys(("rope.dimension_count", "attention.kv_lora_rank", "attention.value_length"), 2)
    keys["attention.key_length"] = 4
    return model("deepseek2", **{f"deepseek2.{key}": value for key, value in (keys | more).items()})


def gguf(folder: Path) -> Target:
    path = folder / "model.gguf"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        header = read_gguf(path)
        files_of(header)
        names = architecture_of(header).names
        views_of(header.tensors, names, Keys(header).predicting, str(path), value_heads(header))

    words: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<x>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ x }}",
        "general.sampling.temp": 0.6,
    }
    yarn: dict[str, object] = {f"gpt-oss.rope.scaling.{key}": 4 for key in ("factor", "original_context_length")}
    yarn |= {"gpt-oss.rope.scaling.type": "yarn", "gpt-oss.rope.scaling.factor": 4.0}
    seeds = [model(name) for name in architectures() if name != "deepseek2"] + [latent({"expert_gating_func": 2})]
    return Target(run, [*seeds, model("qwen3moe", **words), model("gpt-oss", **yarn), file({}, {})], json=False)
