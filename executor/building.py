"""What one rank's model is made with: weight formats, `Build`, cache. A run and the memory plan share it."""

import dataclasses

import torch
from torch import nn

from executor.config import Case
from models.layers import Build, Formats, PagedAttention
from models.parallel import Parallel
from ops.interface import FORMATS, Format, Ops


def formats_of(case: Case, quantised_head: bool) -> Formats:
    """Quantised: every linear layer and expert; the head never in fewer than 8 bits, the router as it is."""
    plain, wanted = FORMATS[case.model_config.dtype], case.quantization
    tiled = dataclasses.replace(plain, tiled=True)
    if wanted.method == "none":
        return Formats(plain, tiled, tiled)
    linear = Format(wanted.method, wanted.group_size, wanted.zero_points)
    return Formats(plain, linear, head=FORMATS["q8"] if quantised_head else tiled)


def build_of(case: Case, ops: Ops, parallel: Parallel, device: torch.device, quantised_head: bool) -> Build:
    return Build(
        ops=ops,
        parallel=parallel,
        formats=formats_of(case, quantised_head),
        dtype=getattr(torch, case.model_config.dtype),
        device=device,
        max_positions=case.max_sequence_length,
    )


def bind_caches(model: nn.Module, case: Case, build: Build, pages: int) -> None:
    """Give every attention layer its cache: one page more than are handed out, for what padding rows write."""
    cache = case.cache_config
    dtype = build.dtype if cache.kv_dtype == "auto" else getattr(torch, cache.kv_dtype)
    for layer in model.modules():
        if isinstance(layer, PagedAttention):
            shape = (pages + 1, cache.page_size, layer.kv_heads, layer.head_dim)
            layer.bind(*(build.ops.kv_cache(*shape, dtype, build.device) for _ in "kv"))
