"""Rank 0's model on PyTorch's meta device, whose tensors have shapes but no memory, and the bytes of its parts.

Splits of a model are even (`check_parallel`), or the first ranks hold a little more: none holds more than rank 0.
"""

from collections import Counter
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from umbra.executor.config.case import Case
from umbra.executor.config.load import load_model_config
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.plan.activations import PlanLine, counted
from umbra.executor.plan.arena_sizes import set_pages_of
from umbra.executor.plan.batch_limits import Limits, limits_of
from umbra.executor.plan.kv_caches import attentions, bind_caches, largest, sharing
from umbra.executor.plan.weight_formats import build_of
from umbra.models.build import Build, Shadows
from umbra.models.causal_lm import CausalLM
from umbra.models.config import ModelConfig
from umbra.models.layers.attention import CacheReader, PagedCache
from umbra.models.layers.base import layers_of
from umbra.models.layers.embedding import LMHead, VocabEmbedding
from umbra.models.layers.experts import Experts
from umbra.models.layers.norm import RMSNorm, ScaledNorm, SplitRMSNorm, WeightlessNorm
from umbra.models.layers.rotary import RotaryTable
from umbra.models.layers.router import ExpertFactors, Router, SelectionBias
from umbra.models.layers.states import LayerStates
from umbra.models.layers.streams import Residual, StreamNorm, Sum
from umbra.models.registry import load, model_class
from umbra.ops.interface import Exchange, Ops
from umbra.ops.parallel.join import parallel_of

EXPERTS = ("experts", "experts' scales and biases")
KINDS: dict[type[nn.Module], str] = {
    VocabEmbedding: "embedding",
    LMHead: "head",
    RMSNorm: "norms",
    Residual: "norms",
    Sum: "norms",
    StreamNorm: "norms",
    SplitRMSNorm: "norms",
    WeightlessNorm: "norms",
    ScaledNorm: "norms",
    Experts: "experts",
    Router: "router",
    SelectionBias: "router",
    ExpertFactors: "router",
}
MTP = ("MTP layer", "experts of the MTP layer")
GUESSING = (*MTP, "head for drafts")  # of which a step that guesses nothing reads none
ROWS = ("embedding", "rotary")  # tables of which a step reads one row for each token


@dataclass(frozen=True)
class Sketch:
    """Rank 0's model with its caches, on meta."""

    config: ModelConfig
    build: Build
    model: CausalLM
    limits: Limits

    @property
    def pages(self) -> int:
        """KV pages that sequences may hold."""
        return self.limits.pages

    @property
    def holds_mtp(self) -> bool:
        """Says whether the checkpoint has a layer for multi-token prediction."""
        return bool(self.model.mtp_sign) and self.build.stored.holds(self.model.mtp_sign)


def sketch_of(
    case: Case,
    shadows: Shadows | None = None,
    ops: Ops | None = None,
    exchange: Exchange | None = None,
    config: ModelConfig | None = None,
) -> Sketch:
    """The model and its caches on meta, of the case's checkpoint or of another `config`. By default, `ops` only has the
    platform's layouts: enough to build a model, but not to run a step."""
    config = config or load_model_config(case)
    ops = ops or cast(Ops, load(PLATFORMS[case.platform].layout)(getattr(torch, case.model_config.dtype)))
    quantised_head = PLATFORMS[case.platform].quantised_head
    parallel = counted(parallel_of(case.parallel_sizes, 0, {}))
    build = build_of(case, ops, parallel, torch.device("meta"), quantised_head, shadows, exchange)
    model = model_class(case.model_name)(config, build)
    limits = limits_of(case, config, True, set_pages_of(model, case, build))
    bind_caches(model, case, build, limits.pages)
    return Sketch(config, build, model, limits)


def weights_of(model: CausalLM) -> list[PlanLine]:
    """The memory of all weights, by kinds of layers."""
    names = ("embedding", "attention", "router", *EXPERTS, "dense MLP", "norms", "head", *GUESSING, "rotary")
    sizes = dict.fromkeys(names, 0)
    for path, layer in layers_of(model):
        name = kind_of(model, path, layer)
        tensors = list(layer.storages())
        largest = max((tensor.nbytes for tensor in tensors), default=0)
        for tensor in tensors:
            beside = name == "experts" and 4 * tensor.nbytes < largest
            sizes[EXPERTS[1] if beside else name] += tensor.nbytes
    tables = [module for module in model.modules() if isinstance(module, RotaryTable)]
    sizes["rotary"] = sum(table.cos.nbytes + table.sin.nbytes for table in tables)
    return [PlanLine(name, size) for name, size in sizes.items() if size]


def kind_of(model: CausalLM, path: str, layer: nn.Module) -> str:
    """The kind of a layer as the plan names it: by what it is part of, its class or, for a plain matrix, its
    neighbouring modules."""
    if path.startswith("eagle3."):
        return "head for drafts"
    if model.mtp_at and path.startswith(f"{model.mtp_at}."):
        return MTP[isinstance(layer, Experts)]
    if type(layer) in KINDS:
        return KINDS[type(layer)]
    around = model.get_submodule(path.rpartition(".")[0]).children()
    of_attention = CacheReader, PagedCache, LayerStates
    return "attention" if any(isinstance(child, of_attention) for child in around) else "dense MLP"


def cache_of(sketch: Sketch) -> PlanLine:
    """The memory of the KV cache of a sketch, and of recurrent states, which take pages of it."""
    caches: list[Tensor] = [cache for layers in sharing(sketch.model) for cache in largest(layers.values()).caches]
    aside = sum(cache.nbytes for layer in attentions(sketch.model, aside=True) for cache in layer.caches)
    pages, limits = len(caches[0]), sketch.limits
    kinds = Counter(cache[0].numel() // limits.page_size for cache in caches)
    tensors = " and ".join(f"{count} tensors of {values} values" for values, count in kinds.items())
    how = f"{tensors} x {pages:,} pages x {limits.page_size} tokens x {caches[0].itemsize} B"
    if limits.set_pages:
        how += f"; {limits.state_pages:,} pages of each sequence are recurrent states"
    if aside:
        how += f"; {aside:,} B of the head for drafts"
    return PlanLine("pages", sum(cache.nbytes for cache in caches) + aside, how)
