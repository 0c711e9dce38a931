"""Binds the KV caches of a model: a cache for each place in its sets of layers, or one arena for all, which also holds
recurrent states.

Layers of different sets may keep tokens of different sizes. Those that share a cache have its memory in pages of the
largest one's size: where another's is a part of it, the layer's cache is the same memory in several times as many
pages, of which those are used that begin where a page of the largest one does."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from umbra.base.errors import UserError
from umbra.cpu_offload.memory.arena import NO_STATES, Frame, StateSizes
from umbra.executor.config.case import Case
from umbra.executor.plan.layer_sets import LayerSet, layer_sets
from umbra.models.build import Build
from umbra.models.layers.attention import PagedCache
from umbra.models.layers.states import LayerStates
from umbra.ops.interface import fixed


def cache_type(case: Case, build: Build) -> torch.dtype:
    dtype = case.cache_config.kv_dtype
    return build.dtype if dtype == "auto" else getattr(torch, dtype)


def bind_caches(model: nn.Module, case: Case, build: Build, pages: int) -> tuple[list[list[Tensor]], Tensor]:
    """Gives every attention layer its cache of `pages` pages and one more, which padding rows write to. Returns the
    caches (pages, ...) of each set of layers, and the states (places, ...) of all recurrent layers."""
    caches_by_position, widest = [], largest(attentions(model))
    for layers in sharing(model):
        caches_by_position.append(caches := _caches(widest, case, build, pages + 1))
        for number, layer in layers.items():
            layer.bind(*map(apart, _seen_by(layer, caches, case, build)), layers=number)
    aside = bind_aside(model, case, build, pages + 1)
    states = torch.empty(1, max((of.elements for of in recurrent(model)), default=0), device=build.device)
    _bind_states(model, states)
    sets = [[cache for caches in caches_by_position[: len(of.layers)] for cache in caches] for of in sets_of(model)]
    return [sets[0] + aside, *sets[1:]], states


def bind_aside(model: nn.Module, case: Case, build: Build, pages: int) -> list[Tensor]:
    """Gives the layers whose caches lie aside theirs, of `pages` pages, and returns these (pages, *shape of a page)."""
    number, tensors = len(sets_of(model)), list[Tensor]()
    for layer in attentions(model, aside=True):
        tensors += (caches := _caches(layer, case, build, pages))
        layer.bind(*map(apart, caches), layers=number)
    return tensors


def recurrent(model: nn.Module) -> list[LayerStates]:
    return [layer for layer in model.modules() if isinstance(layer, LayerStates)]


def state_sizes(model: nn.Module, unit_bytes: int, layers: int | None = None) -> StateSizes:
    """The sizes of a sequence's recurrent states in units of an arena. `layers` is their number, if `model` has only
    some of them."""
    own = recurrent(model)
    if not own:
        return NO_STATES
    nbytes = max(4 * of.elements for of in own)
    return StateSizes(-(-nbytes // unit_bytes) * unit_bytes, layers or len(own))


def _bind_states(model: nn.Module, units: Tensor) -> None:
    """Gives all layers with states theirs in `units` (units, float32 of a unit): those of a place begin with it."""
    for number, layer in enumerate(recurrent(model)):
        flat, stride, rest = units.view(-1), units.shape[1], 0
        views: list[nn.Parameter] = []
        for shape in layer.shapes:
            places = (len(flat) - rest - math.prod(shape)) // stride + 1
            inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            views.append(fixed(flat.as_strided((places, *shape), (stride, *inner), rest)))
            rest += math.prod(shape)
        layer.bind(number, *views)


def attentions(model: nn.Module, aside: bool = False) -> list[PagedCache]:
    """The layers of `model` with pages: those whose caches share memory, or those whose caches lie aside."""
    return [layer for layer in model.modules() if isinstance(layer, PagedCache) and layer.aside == aside]


def sets_of(model: nn.Module) -> tuple[LayerSet, ...]:
    return layer_sets([layer.window for layer in attentions(model)])


def sharing(model: nn.Module) -> list[dict[int, PagedCache]]:
    """The layers that share a cache, by the numbers of their sets: the first one of each set, and so on."""
    layers, sets = attentions(model), sets_of(model)
    most_layers = max(len(of.layers) for of in sets)
    return [
        {number: layers[of.layers[position]] for number, of in enumerate(sets) if position < len(of.layers)}
        for position in range(most_layers)
    ]


def parts_of_pages(model: nn.Module, case: Case, build: Build) -> tuple[int, ...]:
    """For each set of layers, of how many of its own pages a page has the size: numbers of pages are multiplied by
    that."""
    page, *_ = _caches(largest(attentions(model)), case, build, 1)
    first = sharing(model)[0]  # which every set is in
    return tuple(_parts(page, _caches(layer, case, build, 1)[0], case) for layer in first.values())


def _parts(page: Tensor, own: Tensor, case: Case) -> int:
    """Returns how many pages like `own` a `page` has."""
    if page.numel() % own.numel():
        raise UserError(
            f"case {case.name}: cache_config: caches of {page.numel()} and {own.numel()} values a page cannot share "
            f"memory: set kv_dtype: auto"
        )
    return page.numel() // own.numel()


def _seen_by(layer: PagedCache, caches: Sequence[Tensor], case: Case, build: Build) -> list[Tensor]:
    """The memory of `caches` (pages, ...), which are those of the largest layer that shares it, as the caches of
    `layer`."""
    own = _caches(layer, case, build, 1)
    if all(page.shape[1:] == cache.shape[1:] for page, cache in zip(own, caches, strict=True)):
        return list(caches)
    return [
        cache.view(_parts(cache[:1], page, case) * len(cache), *page.shape[1:])
        for page, cache in zip(own, caches, strict=True)
    ]


def frame_of(model: nn.Module, case: Case, build: Build, windows: Sequence[int | None] | None = None) -> Frame:
    """`windows` are those of all layers, if `model` has only some of them."""
    sets = sets_of(model) if windows is None else layer_sets(windows)
    inside, others = _pages(model, case, build)
    layers = max(len(of.layers) for of in sets)
    nbytes, beside = (layers * sum(page.nbytes for page in pages) for pages in (inside, others))
    aside = (page for layer in attentions(model, aside=True) for page in _caches(layer, case, build, 1))
    return Frame(len(inside) * layers, nbytes, beside + sum(page.nbytes for page in aside))


def bind_arena(model: nn.Module, case: Case, build: Build, frames: int, spare: int = 0) -> list[Tensor]:
    """Give all layers their caches in one buffer, and return it as a tensor (units, *shape of a page). It holds an
    arena of `frames` frames, and `spare` bytes after it. Tensors of the caches beside the arena follow it, (units,
    *shape) too, in which a frame has as many units.

    The caches are views of the buffer, each of which starts one unit after the one before: where layers have keys and
    values, page u of the keys at place l is unit u + 2 l, and page u of its values is unit u + 2 l + 1. So the first
    unit of a frame, taken as a page number, addresses the caches of all layers of a set. Caches of another size cannot
    be units of the buffer: page numbers would have to be multiples of both sizes' ratio.
    """
    shared, (inside, _) = sharing(model), _pages(model, case, build)
    first, dtype, page_size = largest(attentions(model)), cache_type(case, build), case.cache_config.page_size
    per_layer, units = len(inside), len(inside) * len(shared)
    counts = {0: frames * units - -spare // inside[0].nbytes} | dict.fromkeys(
        range(per_layer, first.tensors), frames * units
    )
    buffers = [first.new_cache(part, count, page_size, dtype, build.device) for part, count in counts.items()]
    for index, layers in enumerate(shared):
        starts, end = [*range(per_layer * index, per_layer * (index + 1))], (frames - 1) * units + 1
        caches = [buffers[0][begin : begin + end] for begin in starts]
        caches += [buffer[starts[0] : starts[0] + end] for buffer in buffers[1:]]
        for number, layer in layers.items():
            layer.bind(*map(apart, _seen_by(layer, caches, case, build)), layers=number)
    if recurrent(model):
        _bind_states(model, buffers[0].view(len(buffers[0]), -1).view(torch.float32))
    return buffers


def apart(cache: Tensor) -> nn.Parameter:
    """A tensor over the same memory that is not a view, one for each layer: torch.compile rewrites overlapping views
    among the inputs of a graph, and torchair copies a whole tensor that two layers write."""
    if cache.is_meta:
        return fixed(cache)
    return fixed(torch.utils.dlpack.from_dlpack(cache))  # by its whole name: a device's package may put its own there


def _caches(layer: PagedCache, case: Case, build: Build, pages: int) -> list[Tensor]:
    """New caches of so many pages for `layer`, and for those that share them."""
    shape, dtype = (pages, case.cache_config.page_size), cache_type(case, build)
    return [layer.new_cache(part, *shape, dtype, build.device) for part in range(layer.tensors)]


def _pages(model: nn.Module, case: Case, build: Build) -> tuple[list[Tensor], list[Tensor]]:
    """A page of each cache of the largest layer: of those with the size of the first, and of others."""
    pages = _caches(largest(attentions(model)), case, build, 1)
    alike = [page for page in pages if page.shape == pages[0].shape]
    return alike, pages[len(alike) :]


def largest(layers: Iterable[PagedCache]) -> PagedCache:
    """The first of those layers that keep most of a token."""
    return max(layers, key=lambda layer: math.prod(layer.sizes))
