"""Tiny MiniMax-M2 checkpoints in the layouts that people publish the model in, and beside each the same in floats."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantised import WRITERS, Written, fp8
from tests.tiny import save_tiny_m2

# Multiples of a block of 128; half of an expert's columns is one and a half blocks, as an eighth of the original's.
SIZES: dict[str, Any] = dict(hidden_size=256, head_dim=64, rotary_dim=32, num_attention_heads=6, num_key_value_heads=2)
SIZES |= dict(intermediate_size=384, num_local_experts=8, num_experts_per_tok=2, num_hidden_layers=2, vocab_size=320)
SIZES |= dict(initializer_range=0.05)
Way = tuple[str, int, bool]  # format, group, symmetric
Ways = Callable[[str], Way | None]  # of a matrix by its name; None: floats
FP8, AWQ, PACKED = ("fp8", 128, True), ("awq", 128, False), ("pack-quantized", 32, True)


def fp8_of_compressed_tensors(w: Tensor, group: int, bits: int, symmetric: bool) -> Written:
    tensors, means = fp8(w, group, bits, symmetric)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, means


ALL = WRITERS | {"fp8-ct": fp8_of_compressed_tensors}


def experts(way: Way, layers: tuple[int, ...] = (0, 1)) -> Ways:
    prefixes = tuple(f"model.layers.{i}.block_sparse_moe.experts." for i in layers)
    return lambda name: way if name.startswith(prefixes) else None


def both(*ways: Ways) -> Ways:
    """The first of `ways` that is not floats."""
    return lambda name: next((way for choose in ways if (way := choose(name))), None)


def attention(way: Way, matrices: str = "qkvo") -> Ways:
    return lambda name: way if name.endswith(tuple(f"{m}_proj.weight" for m in matrices)) else None


def gate(way: Way) -> Ways:
    return lambda name: way if name.endswith("gate.weight") else None


def official(*more: str) -> dict[str, Any]:
    common = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic"}
    excluded = ["gate", "e_score_correction_bias", "lm_head", *more]
    return common | {"weight_block_size": [128, 128], "modules_to_not_convert": excluded}


def awq_config(*excluded: str, group: int = 128) -> dict[str, Any]:
    common = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True}
    return common | {"modules_to_not_convert": list(excluded)}


def compressed(ignore: list[str], **groups: dict[str, Any]) -> dict[str, Any]:
    """Returns a config of one format, or of several, in which each group names its own."""
    format = "mixed-precision" if len(groups) > 1 else next(iter(groups.values())).pop("format")
    common = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    return common | {"config_groups": groups, "ignore": ignore, "kv_cache_scheme": None}


def four_bit(*targets: str, group: int = 32) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    return {"format": "pack-quantized", "targets": list(targets), "weights": weights, "input_activations": None}


def fp8_blocks(*targets: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128]}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return {"format": "float-quantized", "targets": list(targets), "weights": weights, "input_activations": inputs}


@dataclass(frozen=True)
class Layout:
    ways: Ways
    config: dict[str, Any] | None  # quantization_config
    parts: Mapping[str, str] = field(default_factory=dict)  # parts of names that the files spell otherwise
    more: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that no weight is read from

    def write(self, model: Path, to: Path) -> Path:
        """Writes `to` from the floats in `model`, in shards numbered from zero, with a file that the index does not
        name; and `to`-floats with the values that `to` stands for. Returns the latter."""
        tensors: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        for name, w in load_file(model / "model.safetensors").items():
            if way := self.ways(name):
                format, group, symmetric = way
                written, means[name] = ALL[format](w, group, 4 if format != "fp8" else 8, symmetric)
                tensors |= {name.removesuffix("weight") + last: tensor for last, tensor in written.items()}
            else:
                kept = w if "gate" in name or "bias" in name else w.bfloat16()
                tensors[name] = means[name] = kept
        tensors |= self.more
        config = json.loads((model / "config.json").read_text())
        floats = to.with_name(f"{to.name}-floats")
        floats.mkdir()
        (floats / "config.json").write_text(json.dumps(config))
        save_file(means, floats / "model.safetensors")
        if self.config is not None:
            config["quantization_config"] = self.config
        write_shards(to, config, {self.spelt(name): tensor.contiguous() for name, tensor in tensors.items()})
        return floats

    def spelt(self, name: str) -> str:
        return ".".join(self.parts.get(part, part) for part in name.split("."))


def write_shards(to: Path, config: dict[str, Any], tensors: dict[str, Tensor], count: int = 3) -> None:
    to.mkdir()
    (to / "config.json").write_text(json.dumps(config))
    places = {name: f"model-{i % count:05d}-of-{count:05d}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, shard in places.items() if shard == file}, to / file)
    save_file({"model.norm.weight": torch.zeros(3), "stray": torch.zeros(1)}, to / "model-00003-of-00003.safetensors")
    (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def rewrite(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """Changes a folder's quantization_config and tensors."""
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {name: t for file in set(index.values()) for name, t in load_file(folder / file).items()}
    change(config["quantization_config"], tensors)
    shutil.rmtree(folder)
    write_shards(folder, config, tensors)


def save_m2(folder: Path) -> Path:
    save_tiny_m2(folder, **SIZES)
    return folder


MOE = "model.layers.0.block_sparse_moe"
MTP = {"model.layers.2.self_attn.q_proj.weight": torch.zeros(2), "model.layers.4.enorm.weight": torch.zeros(2)}
KV_SCALES = {
    f"model.layers.{i}.self_attn.{s}": torch.ones(1)
    for i in range(2)
    for s in ("k_proj.k_scale", "v_proj.v_scale", "attn.k_scale")
}
NO_GATE = [r"re:.*lm_head", r"re:.*block_sparse_moe.gate$"]
LAYOUTS = {
    "official": Layout(both(experts(FP8), attention(FP8)), official(), more=MTP),
    "QuantTrio M2.5": Layout(experts(AWQ, (1,)), awq_config("gate", "self_attn", "model.layers.0.")),
    "cyankiwi": Layout(both(experts(PACKED), attention(PACKED)), compressed(NO_GATE, all=four_bit("Linear"))),
    "mratsim FP8 and INT4": Layout(
        both(experts(PACKED), attention(("fp8-ct", 128, True))),
        compressed(
            ["lm_head", r"re:.*\.gate\b"],
            group_0=fp8_blocks("Linear"),
            group_1=four_bit("Linear", r"re:.*block_sparse_moe\.experts\.\d+\.(w1|w2|w3)$"),
        ),
    ),
    "last layer's experts in floats": Layout(
        experts(PACKED, (0,)),
        compressed([*NO_GATE, r"re:.*self_attn", r"re:.*layers\.(1|2)\..*experts"], all=four_bit("Linear")),
    ),
    "transformers' names": Layout(experts(AWQ), awq_config("mlp.gate", "self_attn"), parts={"block_sparse_moe": "mlp"}),
    "a gate in 4 bits": Layout(both(experts(AWQ), gate(AWQ)), awq_config("self_attn")),
}
# What a config does not say; the files decide, and one warning counts the modules.
CONTRADICTIONS = {
    "AWQ of one value matrix": (Layout(both(attention(AWQ, "v"), experts(AWQ)), awq_config("gate", "self_attn")), 2),
    "AWQ of some experts of a layer": (
        Layout(
            lambda name: AWQ if ".experts." in name and "experts.2" not in name else None,
            awq_config("gate", "self_attn"),
        ),
        6,
    ),
    "EliasOenal, AWQ beside FP8 attention": (
        Layout(both(experts(AWQ), attention(FP8)), awq_config("gate", "self_attn"), more=KV_SCALES),
        8,
    ),
}
