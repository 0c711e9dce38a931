"""Makes what one rank's model is built with: weight formats, `Build`, KV caches. Runs and the memory plan use it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from executor.checkpoint.formats.detect import read_scheme
from executor.checkpoint.formats.scheme import Scheme
from executor.config.case import Case
from executor.config.env import RankEnv
from executor.config.load import model_folder
from executor.config.platforms import PLATFORMS
from executor.platform.base import Platform
from models.build import Build, Formats, Shadows
from models.layers.attention import PagedAttention
from ops.cpu.engine import native
from ops.format import FORMATS, Format
from ops.interface import Exchange, Ops
from ops.parallel.groups import Parallel
from ops.parallel.join import join
from umbra.errors import UserError


def init_parallel(case: Case, ranks: RankEnv, platform: Platform) -> Parallel:
    """This rank's place in every split of the case; returns when all ranks have joined."""
    if ranks.world_size != case.world_size:
        raise UserError(
            f"case {case.name}: world_size: {case.world_size}, but this process is one of {ranks.world_size}: "
            f"start all ranks with bash infer.sh {case.name}"
        )
    timeout_s = case.parallel_config.comm_timeout_s
    return join(case.parallel_sizes, ranks.rank, timeout_s, platform.collectives, platform.group_options)


def formats_of(case: Case, scheme: Scheme, quantised_head: bool) -> Formats:
    """The formats of the case's weights. If the case quantises, all linear layers and experts are quantised; the head
    is quantised to 8 bits if `quantised_head`, and the router is not quantised."""
    plain, wanted = FORMATS[case.model_config.dtype], case.quantization
    tiled = dataclasses.replace(plain, tiled=True)
    head = FORMATS["q8"] if quantised_head else tiled
    kinds = PLATFORMS[case.platform].quantised

    def own(module: str) -> Format | None:
        kept = scheme.kept(module)
        return kept if kept and kept.kind in kinds else None

    formats = [e.format for e in scheme.encodings if e.format and e.format.kind in kinds]
    if formats and wanted.method in ("auto", *(f.kind for f in formats)):
        return Formats(plain, formats[0], head, own)
    if wanted.method in ("auto", "none"):
        return Formats(plain, tiled, tiled)
    return Formats(plain, Format(wanted.method, wanted.group_size, wanted.zero_points), head)


def build_of(
    case: Case,
    ops: Ops,
    parallel: Parallel,
    device: torch.device,
    quantised_head: bool,
    offload: Shadows | None = None,
    exchange: Exchange | None = None,
) -> Build:
    return Build(
        ops=ops,
        parallel=parallel,
        formats=formats_of(case, read_scheme(model_folder(case)), quantised_head),
        dtype=getattr(torch, case.model_config.dtype),
        device=device,
        max_positions=case.max_sequence_length,
        offload=offload,
        exchange=exchange,
    )


def packed_facts(case: Case) -> dict[str, Any]:
    """All facts that decide how this rank's weights are packed, except the checkpoint and the rank."""
    return {
        "dtype": case.model_config.dtype,
        "parallel": dataclasses.asdict(case.parallel_sizes),
        "quantization": dataclasses.asdict(case.quantization),
        "shadows": case.offload_config.start_layer if case.offload_config.mode != "none" else None,
        "order": native.order(),  # each of ARM's instruction sets has its own
    }


def cache_type(case: Case, build: Build) -> torch.dtype:
    dtype = case.cache_config.kv_dtype
    return build.dtype if dtype == "auto" else getattr(torch, dtype)


def bind_caches(model: nn.Module, case: Case, build: Build, pages: int) -> None:
    """Give every attention layer its cache of `pages` pages and one more, which padding rows write to."""
    dtype = cache_type(case, build)
    for layer in attentions(model):
        shape = (pages + 1, case.cache_config.page_size, layer.kv_heads, layer.head_dim)
        layer.bind(*(build.ops.kv_cache(*shape, dtype, build.device) for _ in "kv"))


def attentions(model: nn.Module) -> list[PagedAttention]:
    return [layer for layer in model.modules() if isinstance(layer, PagedAttention)]


def frame_of(model: nn.Module, case: Case, build: Build) -> tuple[int, int]:
    """(units, bytes) of one frame of the arena. A frame holds one page of all layers: two units for each layer, its
    keys and its values."""
    units = 2 * len(attentions(model))
    return units, units * _units(model, case, build, 1).nbytes


def bind_arena(model: nn.Module, case: Case, build: Build, frames: int, spare: int = 0) -> Tensor:
    """Give all layers their caches in one buffer, and return it as a tensor (units, *shape of a page). It holds an
    arena of `frames` frames, and `spare` bytes behind that.

    The caches are views of the buffer, each of which starts one unit after the one before: page u of layer l's keys is
    unit u + 2 l, and page u of its values is unit u + 2 l + 1. So the first unit of a frame, taken as a page number,
    addresses the keys and values of all layers.
    """
    layers = attentions(model)
    units = 2 * len(layers)
    arena = _units(model, case, build, frames * units - -spare // _units(model, case, build, 1).nbytes)
    for index, layer in enumerate(layers):
        layer.bind(*(apart(arena[first : first + (frames - 1) * units + 1]) for first in (2 * index, 2 * index + 1)))
    return arena


def apart(view: Tensor) -> Tensor:
    """A tensor over the same memory that is not a view: torch.compile rewrites overlapping views among the inputs of a
    graph, and torchair fails on the result."""
    return torch.utils.dlpack.from_dlpack(view)  # by its whole name: torch_npu puts its own there when it is imported


def _units(model: nn.Module, case: Case, build: Build, count: int) -> Tensor:
    shapes = {(layer.kv_heads, layer.head_dim) for layer in attentions(model)}
    if len(shapes) > 1:
        raise UserError(f"case {case.name}: caches of different (heads, width) cannot share an arena: {shapes}")
    page_size, dtype = case.cache_config.page_size, cache_type(case, build)
    return build.ops.kv_cache(count, page_size, *shapes.pop(), dtype, build.device)
