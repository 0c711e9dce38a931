"""The memory of one rank of a case, by arithmetic: `--plan`. No device is needed: the model is built of tensors that
have shapes and no memory, with the layouts of the platform's ops.

Every split of a model is even (`check_parallel`), so all ranks hold the same and rank 0 stands for all.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from errors import UserError
from executor.config.case import Case
from executor.config.env import RankEnv
from executor.config.platforms import PLATFORMS
from executor.engine.building import bind_caches, build_of
from executor.engine.scheduler import make_scheduler
from executor.job.runners import make_runner
from executor.parallel.groups import Parallel
from executor.parallel.join import place_of
from executor.parallel.partitions import partitions
from executor.planning.activations import Part, fullest, of_model, of_sampling, product, step_shape
from executor.platform.ascend.hccl import buffer_mb
from executor.platform.base import graph_rows
from models.build import Build, Shadows
from models.layers import Experts, LMHead, PagedAttention, RMSNorm, RotaryTable, VocabEmbedding, layers_of
from models.registry import load
from ops.ascend.layout import CAUSAL_MASK
from ops.interface import Ops

MB, GB = 1 << 20, 1 << 30
WEIGHTS, CACHE, PREFILL, GRAPHS, HCCL, REST = (
    "weights", "KV cache", "prefill step", "decode graphs", "HCCL buffers", "allowance",
)  # fmt: skip
EXPERTS = ("experts", "experts' scales")
ROWS = ("embedding", "rotary")  # read one row a token
# A tenth of 64 GB, what serving engines leave alone, rounded down.
ALLOWANCE = Part(
    "CANN, operators, tiles", 6 * GB, "an allowance, not measured: driver, runtime, operators' workspaces, compiled "
    "code, padding of tiles, fragmentation",
)  # fmt: skip


@dataclass(frozen=True)
class Sketch:
    """What rank 0 keeps, of tensors that have shapes and no memory."""

    config: Any
    build: Build
    model: nn.Module
    ignored: frozenset[str]  # checkpoint tensors that may be there without being used
    pages: int  # of the KV cache that are handed out


@dataclass(frozen=True)
class Plan:
    case: Case
    sections: dict[str, list[Part]]
    page_nbytes: int  # of the KV cache, all layers
    decode: list[Part]  # what a decode step reads

    @property
    def total(self) -> int:
        return sum(self.of(name) for name in self.sections)

    @property
    def left(self) -> int:
        return self.case.ascend_config.memory_gb * GB - self.total

    @property
    def tokens_left(self) -> int:
        """Tokens of whole KV pages that what is left has room for."""
        return max(self.left, 0) // self.page_nbytes * self.case.cache_config.page_size

    def of(self, section: str) -> int:
        return sum(part.nbytes for part in self.sections[section])


def make_plan(case: Case) -> Plan:
    if case.platform != "ascend":
        raise UserError(f"case {case.name}: --plan: platform: {case.platform} has no memory plan, only ascend has")
    sketch = sketch_of(case)
    config, build = sketch.config, sketch.build
    weights, cache = weights_of(sketch.model), cache_of(sketch.model, case.cache_config.page_size)
    sections = {
        WEIGHTS: weights,
        CACHE: [cache],
        PREFILL: _prefill(case, config, build),
        GRAPHS: _graphs(case, config, build),
        HCCL: _hccl(case),
        REST: [ALLOWANCE],
    }
    page_nbytes = cache.nbytes // (sketch.pages + 1)
    return Plan(case, sections, page_nbytes, _decode(case, config, build.parallel, weights, page_nbytes))


def sketch_of(case: Case, offload: Shadows | None = None) -> Sketch:
    ranks = RankEnv(rank=0, world_size=case.world_size, local_rank=0, local_world_size=1, error_file="")
    runner = make_runner(case, Path(), ranks)
    ops = cast(Ops, load(PLATFORMS[case.platform].layout)(getattr(torch, case.model_config.dtype)))
    quantised_head = PLATFORMS[case.platform].quantised_head
    build = build_of(case, ops, place_of(case.parallel_sizes, ranks.rank, {}), torch.device("meta"), quantised_head)
    model = runner.build_model(dataclasses.replace(build, offload=offload))
    module, pages = cast(nn.Module, model), make_scheduler(case).pages
    bind_caches(module, case, build, pages)
    return Sketch(runner.config, build, module, model.ignored_weights(), pages)


def weights_of(model: nn.Module) -> list[Part]:
    names = ("embedding", "attention", "router", "experts", "experts' scales", "dense MLP", "norms", "head", "rotary")
    sizes = dict.fromkeys(names, 0)
    for path, layer in layers_of(model):
        name = kind_of(model, path, layer)
        tensors = list(layer.storages())
        quantised = any(not t.is_floating_point() for t in tensors)
        for tensor in tensors:
            scales = name == "experts" and quantised and tensor.is_floating_point()
            sizes["experts' scales" if scales else name] += tensor.nbytes
    tables = [module for module in model.modules() if isinstance(module, RotaryTable)]
    sizes["rotary"] = sum(table.cos.nbytes + table.sin.nbytes for table in tables)
    return [Part(name, size) for name, size in sizes.items() if size]


def kind_of(model: nn.Module, path: str, layer: nn.Module) -> str:
    """What a layer is by its class, or a plain matrix by its neighbours."""
    kinds = {VocabEmbedding: "embedding", LMHead: "head", RMSNorm: "norms", Experts: "experts"}
    if type(layer) in kinds:
        return kinds[type(layer)]
    around = {type(child) for child in model.get_submodule(path.rpartition(".")[0]).children()}
    return "attention" if PagedAttention in around else "router" if Experts in around else "dense MLP"


def cache_of(model: nn.Module, page_size: int) -> Part:
    layers = [layer for layer in model.modules() if isinstance(layer, PagedAttention)]
    caches: list[Tensor] = [cache for layer in layers for cache in (layer.k_cache, layer.v_cache)]
    pages, values = len(caches[0]), caches[0][0].numel() // page_size
    how = f"{len(caches)} tensors x {pages:,} pages x {page_size} tokens x {values} values x {caches[0].itemsize} B"
    return Part("pages", sum(cache.nbytes for cache in caches), how)


def _prefill(case: Case, config: Any, build: Build) -> list[Part]:
    """The largest step: every place of a group is taken by a longest prompt, or as much of that as a chunk holds."""
    data, sequences = case.data_config, case.data_config.batch_size // case.attn_dp_size
    tokens = min(sequences * data.input_max_len, data.chunked_prefill_size or 1 << 62)
    shape = step_shape(case, config, build.parallel, build.dtype.itemsize)
    moment, parts = fullest(of_model(shape, tokens, sequences) | of_sampling(shape, sequences))
    fixed = [
        Part("inputs", _inputs(case, build.ops, tokens, sequences)),
        product("causal mask", rows=CAUSAL_MASK, columns=CAUSAL_MASK, B=1),
    ]
    return [Part(f"{moment}:", 0), *parts, *fixed]


def _graphs(case: Case, config: Any, build: Build) -> list[Part]:
    """Each size has inputs and tensors of its own."""
    if case.exe_mode == "eager":
        return []
    shape = step_shape(case, config, build.parallel, build.dtype.itemsize)
    most = case.data_config.batch_size // case.attn_dp_size
    parts = []
    for rows in sorted({graph_rows(rows, most) for rows in range(1, most + 1)}):
        moment, tensors = fullest(of_model(shape, rows, rows))
        size = sum(part.nbytes for part in tensors) + _inputs(case, build.ops, rows, rows)
        parts.append(Part(f"{rows} sequence(s)", size, f"inputs and {moment}"))
    return parts


def _inputs(case: Case, ops: Ops, tokens: int, sequences: int) -> int:
    """Of one token ids, positions, slots; of one sequence a block table and its row of logits."""
    pages = make_scheduler(case).table_width
    slots, tables, *_ = ops.paging([0], [[0] * pages], [0, 1], [1], case.cache_config.page_size)
    number = torch.int64.itemsize
    return tokens * (2 * number + slots.nbytes) + sequences * (tables.nbytes + number)


def _hccl(case: Case) -> list[Part]:
    """A rank is in one group of each kind; kinds with the same ranks are one group, a group of one rank has none."""
    shared: dict[tuple[int, ...], list[str]] = {}
    for name, members in partitions(case.parallel_sizes).items():
        shared.setdefault(members[0], []).append(name)
    return [
        product(", ".join(names), buffers=2, MB=buffer_mb(case.hccl_config, case.parallel_sizes, names[0]), B=MB)
        for ids, names in shared.items()
        if len(ids) > 1
    ]


def _decode(case: Case, config: Any, parallel: Parallel, weights: list[Part], page_nbytes: int) -> list[Part]:
    """What a step of a whole batch reads at its longest: of the experts, those that are expected to be chosen."""
    batch = case.data_config.batch_size
    own = batch // case.attn_dp_size
    rest = sum(part.nbytes for part in weights if part.name not in (*ROWS, *EXPERTS))
    parts = [Part("all but embedding, experts", rest)]
    if any(config.sparse_layers):
        here = config.num_experts // parallel.moe_ep.size
        share = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** batch
        size = sum(part.nbytes for part in weights if part.name in EXPERTS)
        how = f"{here * share:.1f} of {here} a layer: {here} x (1 - (1 - {config.num_experts_per_tok} / "
        parts.append(Part("experts hit", round(size * share), how + f"{config.num_experts}) ^ {batch})"))
    tokens, page_size = own * case.max_sequence_length, case.cache_config.page_size
    parts.append(product("KV of longest sequences", tokens=tokens, B_a_token=page_nbytes // page_size))
    return parts
