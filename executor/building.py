"""What one rank's model is made with: weight formats, `Build`, cache. A run and the memory plan share it."""

import dataclasses

import torch
from torch import nn

from executor.cases import model_folder
from executor.config import Case
from executor.formats.detect import read_scheme
from executor.formats.stored import Scheme
from executor.platform import PLATFORMS
from models.build import Build, Formats
from models.layers import PagedAttention
from models.parallel import Parallel
from ops.interface import FORMATS, Format, Ops


def formats_of(case: Case, scheme: Scheme, quantised_head: bool) -> Formats:
    """Quantised: every linear layer and expert; the head never in fewer than 8 bits, the router as it is."""
    plain, wanted = FORMATS[case.model_config.dtype], case.quantization
    tiled = dataclasses.replace(plain, tiled=True)
    head = FORMATS["q8"] if quantised_head else tiled
    own = scheme.format
    if own and own.kind in PLATFORMS[case.platform].quantised and wanted.method in ("auto", own.kind):
        return Formats(plain, own, head, scheme.quantised)
    if wanted.method in ("auto", "none"):
        return Formats(plain, tiled, tiled)
    return Formats(plain, Format(wanted.method, wanted.group_size, wanted.zero_points), head)


def build_of(case: Case, ops: Ops, parallel: Parallel, device: torch.device, quantised_head: bool) -> Build:
    return Build(
        ops=ops,
        parallel=parallel,
        formats=formats_of(case, read_scheme(model_folder(case)), quantised_head),
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
