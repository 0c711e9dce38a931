"""Tiny checkpoints in every quantised format, written element by element from the formats' descriptions (those of
compressed-tensors by its own library), and beside each the same model in floats."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32  # type: ignore[import-untyped]
from safetensors.torch import load_file, save_file
from torch import Tensor

from umbra.ops.formats import SPECS
from umbra.ops.formats.mxfp4 import E2M1
from umbra.ops.formats.quantised import Nested

AWQ_SHIFTS = [0, 16, 4, 20, 8, 24, 12, 28]
Written = tuple[dict[str, Tensor], Tensor]  # a module's tensors by their last name, and what they mean (N, K)


def levels_of(w: Tensor, group: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Levels (N, K) int that use their whole range, scales and zeros (N, K / group). Which levels does not matter."""
    parts, top = w.unflatten(1, (-1, group)), (1 << bits) - 1
    low, high = parts.amin(-1), parts.amax(-1)
    if symmetric:
        scales = (parts.abs().amax(-1) / (top // 2)).half()
        zeros = torch.full_like(scales, (top + 1) // 2)
    else:
        scales = ((high - low) / top).half()
        zeros = (-low / scales.float()).round().clamp(0, top)
    levels = ((parts / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, top)
    return levels.flatten(1).int(), scales, zeros.int()


def meaning(levels: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    times = levels.shape[1] // scales.shape[1]
    wide = [x.repeat_interleave(times, 1).double() for x in (zeros, scales)]
    return ((levels.double() - wide[0]) * wide[1]).float()


def packed(levels: Tensor, shifts: list[int]) -> Tensor:
    """(a, b) to (a, b / n) int32: of n elements, element j at the bit shifts[j]."""
    parts = levels.unflatten(1, (-1, len(shifts))).numpy().astype(np.uint32)
    words = sum((parts[..., j] << np.uint32(shift) for j, shift in enumerate(shifts)), np.uint32(0))
    return torch.from_numpy(words.view(np.int32))


def awq(w: Tensor, group: int, bits: int, symmetric: bool) -> Written:
    levels, scales, zeros = levels_of(w, group, bits, symmetric)
    tensors = {"qweight": packed(levels.T, AWQ_SHIFTS), "qzeros": packed(zeros.T, AWQ_SHIFTS), "scales": scales.T}
    return tensors, meaning(levels, scales, zeros)


def awq_levels(words: Tensor) -> Tensor:
    """(a, b) int32 to (a, 8 b): each output's nibble from its own place."""
    return torch.stack([words >> shift & 15 for shift in AWQ_SHIFTS], -1).flatten(1)


def awq_meaning(name: str, tensors: dict[str, Tensor]) -> Tensor:
    levels, zeros = (awq_levels(tensors[f"{name}.{kind}"]).T for kind in ("qweight", "qzeros"))
    return meaning(levels, tensors[f"{name}.scales"].T, zeros)


def gptq(w: Tensor, group: int, bits: int, symmetric: bool, ordered: bool = False) -> Written:
    """`ordered`: the columns are quantised in another order than they are stored in."""
    group, columns = w.shape[1] if group < 0 else group, w.shape[1]
    group_of = torch.randperm(columns) if ordered else torch.arange(columns)
    levels, scales, zeros = levels_of(w[:, group_of.argsort()], group, bits, symmetric)
    zeros = zeros.clamp(min=1)  # the format stores them less one
    shifts = list(range(0, 32, bits))
    tensors: dict[str, Any] = {"qweight": packed(levels[:, group_of], shifts).T, "qzeros": packed(zeros.T - 1, shifts)}
    tensors |= {"scales": scales.T, "g_idx": (group_of // group).int()}
    return tensors, meaning(levels, scales, zeros)[:, group_of]


def pack_quantized(w: Tensor, group: int, bits: int, symmetric: bool, ordered: bool = False) -> Written:
    group, columns = w.shape[1] if group < 0 else group, w.shape[1]
    group_of = torch.randperm(columns) if ordered else torch.arange(columns)
    levels, scales, zeros = levels_of(w[:, group_of.argsort()], group, bits, symmetric)
    middle = 1 << (bits - 1)
    tensors = {
        "weight_packed": pack_to_int32((levels[:, group_of] - middle).to(torch.int8), bits),
        "weight_shape": torch.tensor(w.shape),
        "weight_scale": scales,
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_to_int32((zeros - middle).to(torch.int8), bits, packed_dim=0)
    if ordered:
        tensors["weight_g_idx"] = (group_of // group).int()
    return tensors, meaning(levels, scales, zeros)[:, group_of]


def int_quantized(w: Tensor, group: int, bits: int, symmetric: bool) -> Written:
    levels, scales, zeros = levels_of(w, w.shape[1], bits, symmetric)
    tensors = {"weight": (levels - 128).to(torch.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return tensors, meaning(levels, scales, zeros)


def fp8(w: Tensor, group: int, bits: int, symmetric: bool) -> Written:
    rows, columns = (-(-size // 128) for size in w.shape)
    scales, means = torch.empty(rows, columns), torch.empty_like(w)
    stored = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = w[block].abs().max() / 448
            stored[block] = (w[block] / scales[i, j]).to(torch.float8_e4m3fn)
            means[block] = stored[block].float() * scales[i, j]
    return {"weight": stored, "weight_scale_inv": scales}, means


def float_quantized(w: Tensor, group: int, bits: int, symmetric: bool) -> Written:
    """With a scale for each row, or for the matrix if `group` is 0."""
    scales = (w.abs().amax(1, keepdim=True) if group else w.abs().max()[None]) / 448
    stored = (w / scales).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scales}, stored.float() * scales


def nvfp4(w: Tensor, group: int, bits: int, symmetric: bool, divided: bool = False) -> Written:
    """`divided`: as compressed-tensors has it."""
    groups = w.unflatten(1, (-1, 16))
    whole = w.abs().max() / (6 * 448)
    stored, factor = (1 / whole, 1 / (1 / whole)) if divided else (whole, whole)
    scales = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
    wide, values = (factor * scales.float())[..., None], torch.tensor(E2M1)
    codes = ((groups / wide)[..., None] - values).abs().argmin(-1).flatten(1).to(torch.uint8)
    written = {"weight_scale": scales, "input_global_scale" if divided else "input_scale": torch.ones(1)}
    written["weight_packed" if divided else "weight"] = codes[:, ::2] | codes[:, 1::2] << 4
    written["weight_global_scale" if divided else "weight_scale_2"] = stored.view(1) if divided else stored
    return written, (values[codes.int()].unflatten(1, (-1, 16)) * wide).flatten(1)


def modelopt_fp8(w: Tensor) -> Written:
    scale = w.abs().max() / 448
    stored = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.ones(())}, stored.float() * scale


def compressed_config(format: str, group: int, bits: int, symmetric: bool) -> dict[str, Any]:
    floats = format in ("float-quantized", "nvfp4-pack-quantized")
    weights: dict[str, Any] = {"num_bits": bits, "type": "float" if floats else "int"}
    weights |= {"symmetric": symmetric, "strategy": {-1: "channel", 0: "tensor"}.get(group, "group")}
    weights |= {"group_size": group if group > 0 else None, "actorder": None, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True} if format == "w8a8" else None
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if inputs else format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "kv_cache_scheme": None,
    }


WRITERS: dict[str, Callable[[Tensor, int, int, bool], Written]] = {"awq": awq, "gptq": gptq, "gptq_v2": gptq}
WRITERS |= {"pack-quantized": pack_quantized, "int-quantized": int_quantized, "float-quantized": float_quantized}
WRITERS |= {"w8a8": int_quantized, "fp8": fp8, "auto_round:auto_gptq": gptq, "auto_round": gptq}
WRITERS |= {"auto_round:auto_awq": awq, "desc_act": partial(gptq, ordered=True)}
WRITERS |= {"actorder": partial(pack_quantized, ordered=True)}
WRITERS |= {"modelopt": nvfp4, "nvfp4-pack-quantized": partial(nvfp4, divided=True)}


def config_of(format: str, group: int, bits: int, symmetric: bool) -> dict[str, Any]:
    if format == "awq":
        common = {"quant_method": "awq", "version": "gemm", "bits": bits, "group_size": group}
        return common | {"zero_point": True, "modules_to_not_convert": ["mlp.gate"]}
    if format.startswith(("gptq", "desc_act")):
        act, version = format == "desc_act", format if "gptq" in format else "gptq"
        common = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act, "sym": symmetric}
        return common | {"checkpoint_format": version, "dynamic": {r"-:.*mlp\.gate$": {}}}
    if format.startswith("auto_round"):
        common = {"quant_method": "auto-round", "packing_format": format, "data_type": "int", "autoround_version": "1"}
        extra = {f"model.layers.{i}.mlp.gate": {"bits": 16, "data_type": "float"} for i in range(2)}
        return common | {"bits": bits, "group_size": group, "sym": symmetric, "extra_config": extra}
    if format == "fp8":
        common = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        gates = [f"model.layers.{i}.mlp.gate" for i in range(2)]
        return common | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", *gates]}
    if format == "modelopt":
        common = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": None}
        return common | {"ignore": ["lm_head", "model.layers.*.mlp.gate"]}
    if format == "actorder":
        config = compressed_config("pack-quantized", group, bits, symmetric)
        config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
        return config
    return compressed_config(format, group, bits, symmetric)


def is_quantised(name: str) -> bool:
    return ".layers." in name and (name.endswith(("_proj.weight", "_proj_with_mqa.weight")) or ".experts." in name)


def quantise_tiny(
    model: Path,
    to: Path,
    format: str,
    group: int = 32,
    bits: int = 4,
    symmetric: bool = False,
    quantised: Callable[[str], bool] = is_quantised,
    **settings: Any,
) -> Path:
    """Writes `to`, of which the matrices are quantised that `quantised` says and the config has these `settings` as
    well, and `to`-floats with the same weights as floats; returns the latter."""
    floats = to.with_name(to.name + "-floats")
    for folder in (to, floats):
        shutil.copytree(model, folder)
    weights, tensors, means = load_file(model / "model.safetensors"), {}, {}
    for name, w in weights.items():
        if not quantised(name):
            tensors[name] = means[name] = w
            continue
        written, means[name] = WRITERS[format](w, group, bits, symmetric)
        if format in ("gptq_v2", "auto_round"):
            written["qzeros"] = torch.from_numpy(
                (written["qzeros"].numpy().view(np.uint32) + np.uint32(0x11111111 if bits == 4 else 0x01010101)).view(
                    np.int32
                )
            )
        tensors |= {name.removesuffix("weight") + kind: t.contiguous() for kind, t in written.items()}
    save_file(tensors, to / "model.safetensors")
    save_file(means, floats / "model.safetensors")
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] = config_of(format, group, bits, symmetric) | settings
    (to / "config.json").write_text(json.dumps(config))
    return floats


def mxfp4(w: Tensor) -> Written:
    """The tensors of all experts' weights (E, N, K)."""
    groups = w.unflatten(-1, (-1, 32)).double()  # (E, N, K / 32, 32)
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    wide, values = exponents[..., None].exp2(), torch.tensor(E2M1, dtype=torch.double)
    codes = (groups[..., None] / wide[..., None] - values).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    means = (values[codes.int()] * wide).flatten(2).float()
    return {"blocks": blocks, "scales": (exponents + 127).to(torch.uint8)}, means


def mxfp4_tiny(model: Path, to: Path) -> Path:
    """Writes `to` from a gpt-oss in floats, as its own checkpoints are, and `to`-floats with the same weights as
    floats; returns the latter."""
    floats = to.with_name(to.name + "-floats")
    for folder in (to, floats):
        shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    means = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        written, mean = mxfp4(tensors.pop(name).mT)
        tensors |= {f"{name}_{kind}": tensor.contiguous() for kind, tensor in written.items()}
        means[name] = mean.mT.contiguous()
    save_file(tensors, to / "model.safetensors")
    save_file(means, floats / "model.safetensors")
    config = json.loads((to / "config.json").read_text())
    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": excluded}
    (to / "config.json").write_text(json.dumps(config))
    return floats


def nested(kind: str, rows: int, columns: int, group: int = 256) -> Nested:
    """Random rows in one of the formats whose scales have scales, of weights below 4."""
    if kind == "nvfp4":
        scales = torch.randint(0x28, 0x38, (rows, columns // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
        levels = torch.randint(16, (rows, columns), dtype=torch.uint8)
        return Nested(SPECS[kind], levels, scales, None, torch.rand(rows, 1) / 2)
    bits = {"q5_k": 5, "q6_k": 6}.get(kind, 4)
    lowest, unit, top = (0, 32, 64) if kind in ("q4_k", "q5_k") else (-128, 16, 128) if bits == 6 else (-32, 32, 32)
    scales = torch.randint(lowest, top, (rows, columns // unit)).to(torch.int8)
    d = torch.rand(rows, columns // group).half() / (1024 if bits > 4 else 512)
    levels = torch.randint(1 << bits, (rows, columns), dtype=torch.uint8)
    if lowest:
        return Nested(SPECS[kind], levels, scales, None, d)
    minimums = torch.randint(64, (rows, columns // 32), dtype=torch.uint8)
    return Nested(SPECS[kind], levels, scales.view(torch.uint8), minimums, d, d * 10)
