"""Tells which of Ascend's kernels multiply with a model's weights: those of ops/ascend/vector_core where tokens are few
and weights have 4 bits, else torch_npu's. Imports neither torch_npu nor torchair."""

import itertools
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

from torch import nn

from umbra.base.errors import UserError
from umbra.executor.platform.ascend.settings import AscendSettings
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.causal_lm import CausalLM
from umbra.models.layers.base import layers_of
from umbra.models.layers.experts import Experts
from umbra.models.layers.linear import MergedLinear, RowLinear
from umbra.ops.ascend.cann import OPTIONAL_OFFSETS_SINCE, TILED_CACHE_SINCE, Abilities, since
from umbra.ops.ascend.vector_core.calls import unfit
from umbra.ops.ascend.weights import AscendExperts, AscendMatrix, Bank

BUILD = "bash ops/ascend/vector_core/build.sh"


def gemv_tokens(settings: PlatformSettings, built: bool) -> int:
    """Most tokens of a step whose products run on the vector cores; 0: no products do. `built` says whether
    ops/ascend/vector_core has been built."""
    ascend = settings.of_device(AscendSettings)
    wanted = ascend.decode_gemv
    if wanted == "on" and not built:
        raise UserError(f"case {settings.case}: ascend_config.decode_gemv: on: the kernels are not built: run {BUILD}")
    return ascend.gemv_max_tokens if wanted != "off" and built else 0


def chosen_kernels(model: nn.Module, settings: PlatformSettings, built: bool) -> dict[str, str]:
    """The kernels of equal parts of layers, under names such as `mlp.experts of layers 0-47, 1 to 8 tokens`. Left
    out are routers and the output head, which are always floats."""
    tokens = gemv_tokens(settings, built)
    # (few, more, why not) -> part of a layer -> layers
    by_kernels: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    for path, layer in layers_of(model):
        match = re.search(r"(?:model\.|(.*\.)|)layers\.(\d+)\.(.+)", path)
        if match and isinstance(layer, (Experts, MergedLinear, RowLinear)):
            weights: Any = layer.weights if isinstance(layer, Experts) else layer.weight
            why = unfit(weights)
            if why and settings.of_device(AscendSettings).decode_gemv == "on":
                raise UserError(f"case {settings.case}: ascend_config.decode_gemv: on: {path}: {why}: set it to auto")
            why = why or _why_none(settings, built)
            kernels = (*_kernels(weights, in_planes=not why), why)
            by_kernels.setdefault(kernels, {}).setdefault((match[1] or "") + match[3], []).append(int(match[2]))
    lines = {}
    for (few, more, why), parts in by_kernels.items():
        for layers in dict.fromkeys(tuple(numbers) for numbers in parts.values()):
            names = ", ".join(part for part, numbers in parts.items() if tuple(numbers) == layers)
            what = f"{names} of layers {_ranges(layers)}"
            if why:
                lines[what] = f"{more} ({why})"
            else:
                lines[f"{what}, 1 to {tokens} tokens"] = f"{few} on the vector cores"
                lines[f"{what}, {tokens + 1} tokens or more"] = more
    return lines


def check_offsets(model: nn.Module, settings: PlatformSettings, cann: str | None) -> None:
    """Refuses 4-bit experts without zero points where CANN's grouped product cannot do without. Those in planes are
    unpacked before."""
    if cann is None or since(cann, OPTIONAL_OFFSETS_SINCE):
        return
    for path, layer in layers_of(model):
        plane = cast(Bank, layer.weights).w13 if isinstance(layer, Experts) else None
        if plane and plane.planes is None and plane.format.kind == "q4" and plane.offsets is None:
            raise UserError(
                f"case {settings.case}: quantization.zero_points: false: {path}: npu_grouped_matmul of CANN {cann} "
                "needs a zero point for each group of 4-bit weights: set method: q4 and zero_points: true, or install "
                f"CANN {'.'.join(map(str, OPTIONAL_OFFSETS_SINCE))} or later"
            )


def cache_line(can: Abilities) -> dict[str, str]:
    """The kernels that write the KV cache."""
    needs = f"CANN {'.'.join(map(str, TILED_CACHE_SINCE))} and torch_npu 2.10"
    return {
        "KV cache": "npu_qkv_rms_norm_rope_cache, which also splits, norms and rotates, for heads of 128 that have "
        "norms of their own; npu_scatter_pa_kv_cache for others, npu_scatter_nd_update_ for heads wider than 128"
        if can.tiled_cache
        else f"npu_scatter_nd_update_ (tiles, which fewer kernels write, need {needs})"
    }


def prefetch_attention(model: CausalLM) -> None:
    """Lets each layer's experts ask for the weight that the next layer reads first."""
    for layer, following in itertools.pairwise(model.model.layers[: model.model.depth]):
        projection = next(m.weight for m in following.modules() if isinstance(m, MergedLinear))
        for experts in layer.modules():
            if isinstance(experts, Experts) and isinstance(experts.weights, AscendExperts):
                experts.weights.ahead = cast(AscendMatrix, projection)


def _kernels(weights: AscendMatrix | Bank, in_planes: bool) -> tuple[str, str]:
    """(the kernel for few tokens by 4-bit weights, the kernels for everything else)"""
    first = "unpack_w4a16 and " if in_planes else ""
    if not isinstance(weights, AscendMatrix):
        rounded = " by rows in int8" if weights.w13.format.spec.int8_inputs else ""
        return "fused_moe[_scores]_w4a16", f"{first}npu_grouped_matmul{rounded}"
    if weights.format.spec.int8_inputs:
        return "", "npu_quant_matmul by rows in int8"
    return "gemv_w4a16", f"{first}mm" if in_planes or weights.scales is None else "npu_weight_quant_batchmatmul"


def _why_none(settings: PlatformSettings, built: bool) -> str:
    if settings.of_device(AscendSettings).decode_gemv == "off":
        return "decode_gemv: off"
    return "" if built else f"decode_gemv: the kernels are not built: {BUILD}"


def _ranges(numbers: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> 0-2, 5"""
    parts = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        (_, first), *rest = run
        parts.append(f"{first}-{rest[-1][1]}" if rest else f"{first}")
    return ", ".join(parts)
