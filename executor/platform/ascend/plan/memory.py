"""Counts the memory that one rank of an Ascend case needs, for `--plan`. No device is needed: the model is built on
PyTorch's meta device, whose tensors have shapes but no memory, in the layouts of the platform's ops.

Splits of a model are even (`check_parallel`), or the first ranks hold a little more, so rank 0 is counted.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import nn

from umbra.executor.config.case import MOST_DRAFTING, Case
from umbra.executor.config.load import load_model_config
from umbra.executor.config.units import GB, MB
from umbra.executor.plan.activations import Ledger, Moment, PlanLine, batch_of, product, sampling, shorten
from umbra.executor.plan.counting import Counting
from umbra.executor.plan.kv_caches import attentions, recurrent
from umbra.executor.plan.memory import ARENA, CACHE, GRAPHS, PREFILL, REMEDIES, REST, WEIGHTS, MemoryPlan
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.plan.sketch import EXPERTS, GUESSING, ROWS, Sketch, cache_of, sketch_of, weights_of
from umbra.executor.platform.ascend.exchange import check_slots, most_rows, why_gathered, window_mb
from umbra.executor.platform.ascend.hccl import buffer_mb
from umbra.executor.platform.ascend.plan.shadows import CountedShadow, CountedShadows
from umbra.executor.platform.ascend.settings import AscendSettings, HcclSettings
from umbra.executor.platform.base import graph_rows
from umbra.models.batch import Batch
from umbra.models.config import ModelConfig
from umbra.models.layers.base import layers_of
from umbra.models.layers.experts import Experts
from umbra.models.layers.mtp import MultiTokenPrediction
from umbra.ops.ascend.counted import AscendCosts
from umbra.ops.ascend.layout import CAUSAL_MASK, AscendLayout
from umbra.ops.ascend.weights import AscendExperts
from umbra.ops.counted import CountedExchange, CountedOps
from umbra.ops.interface import Exchange, Ops
from umbra.ops.parallel.partitions import ParallelSizes, partitions

HCCL = "HCCL buffers"
# A tenth of 64 GB, rounded down: serving engines usually leave as much free.
ALLOWANCE = PlanLine(
    "CANN, operators, tiles",
    6 * GB,
    "an allowance, not measured: driver, runtime, operators' workspaces, compiled "
    "code, padding of tiles, fragmentation",
)


def make_plan(case: Case, arena: Sequence[PlanLine] = ()) -> MemoryPlan:
    """The plan of an Ascend case. `arena` has the parts of the buffer that experts with shadows share with the KV
    cache."""
    ledger = Ledger()
    settings, config = platform_settings(case), load_model_config(case)
    ops = counted_ops(case, config, ledger)
    why = why_gathered(settings, config)
    check_slots(settings, why)
    exchanged = 0 if why else most_rows(settings)
    exchange = cast(Exchange, CountedExchange(ops, case.world_size, exchanged)) if exchanged else None
    shadows = CountedShadows(case, ops, config.experts_per_token) if arena else None
    sketch = sketch_of(case, shadows, ops=cast(Ops, ops), exchange=exchange)
    weights, cache = weights_of(sketch.model), cache_of(sketch)
    held = {ARENA: [*arena, *shadows.tables(_rows(case))]} if shadows else {CACHE: [cache]}
    layers = len(attentions(sketch.model))
    shorten(sketch.model)
    decoder = sketch.model.model
    decoder.depth = sum(not isinstance(layer, MultiTokenPrediction) for layer in decoder.layers)
    sections = {
        WEIGHTS: weights,
        **held,
        PREFILL: _prefill(case, sketch, ledger),
        GRAPHS: _graphs(case, sketch, ledger),
        HCCL: _hccl(case) + _window(exchanged, config, case.parallel_sizes),
        REST: [ALLOWANCE, *_moving(case, sketch.model)],
    }
    page_nbytes = cache.nbytes // (sketch.pages + 1)
    experts = sum(part.nbytes for part in weights if part.name in EXPERTS) + (shadows.nbytes if shadows else 0)
    beside = sum(cache.nbytes for layer in attentions(sketch.model, aside=True) for cache in layer.caches)
    # Of a page by a step that guesses nothing.
    read = (cache.nbytes - beside) // (sketch.pages + 1) * (layers - bool(sketch.model.mtp_at)) // layers
    decode = _decode(case, sketch, weights, experts, read)
    return MemoryPlan(
        case, sections, REMEDIES | {HCCL: "lower hccl_config.buffer_mb"}, page_nbytes, sketch.limits, decode
    )


def counted_ops(case: Case, config: ModelConfig, ledger: Ledger) -> CountedOps:
    """The ops of an Ascend case, which name to `ledger` the tensors that they make."""
    dtype: torch.dtype = getattr(torch, case.model_config.dtype)
    experts, routing = case.parallel_sizes.physical(config.expert_count), case.of_device(AscendSettings).moe_routing
    page_size = case.cache_config.page_size
    costs = partial(AscendCosts, routing=routing)
    return CountedOps(AscendLayout(dtype), dtype, page_size, experts, costs, name=ledger.note)


def counting(case: Case, config: ModelConfig) -> Counting:
    """Returns the way in which steps of a model with this config run: their kernels, and whether rows are exchanged or
    gathered."""
    settings = platform_settings(case)
    return Counting(AscendCosts, 0 if why_gathered(settings, config) else most_rows(settings))


def _prefill(case: Case, sketch: Sketch, ledger: Ledger) -> list[PlanLine]:
    """The largest prefill step: the longest prompt for every sequence of a group, limited by the chunk size."""
    sequences, tokens = case.data_config.batch_size // case.attn_dp_size, case.prefill_tokens
    shared = case.parallel_config.sequence_parallel(tokens)
    if shared:
        tokens = sketch.build.parallel.attn_tp.padded(tokens)
    batch = _batch(case, sketch, tokens, sequences, case.attn_dp_size)
    batch = dataclasses.replace(batch, sequence_parallel=shared)
    in_model = _fullest(sketch, ledger, batch, sequences, case.attn_dp_size)
    after = sampling(sketch.config.vocab_size, sequences, sketch.build.dtype.itemsize)
    moment = max(in_model, after, key=lambda moment: moment.nbytes)
    fixed = [PlanLine("inputs", _inputs(batch)), product("causal mask", rows=CAUSAL_MASK, columns=CAUSAL_MASK, B=1)]
    return [PlanLine(f"fullest at {moment.name}", 0), *moment.parts, *fixed, *_unpacked(case, sketch)]


def _unpacked(case: Case, sketch: Sketch) -> list[PlanLine]:
    """The values of a layer's 4-bit experts: npu_grouped_matmul unpacks all of them to its workspace before it
    multiplies by them. Where the vector cores' kernels are used, they are in the banks of ops/ascend/tiles.py. Of
    experts with shadows they are those of the largest bank."""
    sizes = []
    for layer in (layer for _, layer in layers_of(sketch.model) if isinstance(layer, Experts)):
        weights: object = layer.weights
        if isinstance(weights, CountedShadow) and weights.format.kind == "q4":
            sizes.append((max(weights.shadows.banks(_rows(case))), layer.hidden, weights.inner))
        if isinstance(weights, AscendExperts) and weights.w13.format.kind == "q4":
            sizes.append((weights.count, layer.hidden, weights.inner))
    if not sizes:
        return []
    experts, hidden, inner = max(sizes, key=math.prod)
    of_expert = dict(experts=experts, B=sketch.build.dtype.itemsize)
    return [
        product("w13 of a layer, unpacked", rows=hidden, columns=2 * inner, **of_expert),
        product("w2 of a layer, unpacked", rows=inner, columns=hidden, **of_expert),
    ]


def _graphs(case: Case, sketch: Sketch, ledger: Ledger) -> list[PlanLine]:
    """Graphs of different sizes share no memory: each has its own inputs and tensors."""
    if case.exe_mode == "eager":
        return []
    parts, guessing = [], min(case.data_config.batch_size // case.attn_dp_size, MOST_DRAFTING)
    for rows in _rows(case):
        batch = _batch(case, sketch, rows, rows, None)
        moment = ledger.fullest(sketch.model, _step(sketch), batch)
        parts.append(PlanLine(f"{rows} row(s)", moment.nbytes + _inputs(batch), f"inputs and {moment.name}"))
        if not sketch.model.guesses:
            continue
        # After the step, and for further guesses after those of fewer rows.
        wanted = [number for number in _rows(case) if number <= graph_rows(min(rows, guessing), rows)]
        first = [_guess(sketch, batch, number, 0) for number in wanted]
        further = [dataclasses.replace(first[-1], logit_rows=None, wanted_per_group=None)] if rows in wanted else []
        steps = [*first, *further]
        sizes = (ledger.fullest(sketch.model, sketch.model.guess, of).nbytes + _inputs(of) for of in steps)
        parts.append(PlanLine(f"guesses after {rows} row(s)", sum(sizes), f"{len(steps)} sizes"))
    return parts


def _step(sketch: Sketch) -> Callable[[Batch], object]:
    return sketch.model.with_hidden if sketch.model.guesses else sketch.model.forward


def _guess(sketch: Sketch, batch: Batch, wanted: int, groups: int) -> Batch:
    """The batch that gives `wanted` guesses after that of a step in each of `groups` groups; 0: as in a graph."""
    return dataclasses.replace(
        batch,
        recurrent=None,
        logit_rows=torch.empty(wanted, dtype=torch.int64, device="meta"),
        wanted_per_group=None if batch.sequence_parallel else (wanted,) * groups,
        hidden=torch.empty(len(batch.token_ids), sketch.model.state_width, dtype=sketch.build.dtype, device="meta"),
    )


def _fullest(sketch: Sketch, ledger: Ledger, batch: Batch, sequences: int, groups: int) -> Moment:
    """The fullest moment of a prefill step and of the guesses after it, which keep its hidden states."""
    fullest = ledger.fullest(sketch.model, _step(sketch), batch)
    if not sketch.model.guesses:
        return fullest
    guess = _guess(sketch, batch, sequences, groups)
    after = ledger.fullest(sketch.model, sketch.model.guess, guess)
    hidden = PlanLine("hidden states", guess.hidden.nbytes if guess.hidden is not None else 0)
    return max(fullest, Moment(f"a guess: {after.name}", [*after.parts, hidden]), key=lambda moment: moment.nbytes)


def _rows(case: Case) -> list[int]:
    """The sizes of captured decode steps of a data-parallel group."""
    most = case.decode_rows // case.attn_dp_size
    return sorted({graph_rows(rows, most) for rows in range(1, most + 1)})


def _batch(case: Case, sketch: Sketch, tokens: int, sequences: int, groups: int | None) -> Batch:
    limits, page_size = sketch.limits, case.cache_config.page_size
    sets, stateful = len(limits.windows) + bool(sketch.model.eagle3), len(recurrent(sketch.model))
    expanded = groups is not None and limits.expansion is not None and limits.expansion.pays(0, tokens // sequences)
    sizes = tokens, sequences, limits.table_width, page_size, groups, sets, stateful, expanded
    batch = batch_of(sketch.build.ops, *sizes)
    if not batch.expanded:
        return batch
    longest = (limits.max_sequence_length,) * sequences  # of whose tokens keys and values are made
    paged = tuple(of._replace(kv_lens=longest) for of in batch.paged)
    return dataclasses.replace(batch, expanded=dataclasses.replace(batch.expanded, paged=paged))


def _inputs(batch: Batch) -> int:
    return sum(tensor.nbytes for tensor in batch.tensors().values())


def _hccl(case: Case) -> list[PlanLine]:
    """HCCL's buffers for this rank's groups. Groups of the same ranks share a buffer; a group of one rank has none."""
    shared, hccl = dict[tuple[int, ...], list[str]](), case.of_device(HcclSettings)
    for name, members in partitions(case.parallel_sizes).items():
        shared.setdefault(members[0], []).append(name)
    return [
        product(", ".join(names), buffers=2, MB=buffer_mb(hccl, case.parallel_sizes, names[0]), B=MB)
        for ids, names in shared.items()
        if len(ids) > 1
    ]


def _window(rows: int, config: ModelConfig, sizes: ParallelSizes) -> list[PlanLine]:
    """The buffers of the communicator that rows of experts are exchanged over, on Atlas A3; Atlas A2 has none."""
    return [product("exchange of rows (A3)", buffers=2, MB=window_mb(rows, config, sizes), B=MB)] if rows else []


def _moving(case: Case, model: nn.Module) -> list[PlanLine]:
    """At most: a layer's experts as they leave and as they come, and without tiles before and after that."""
    parallel = case.parallel_config
    if not parallel.expert_slots or parallel.rebalance_steps is None:
        return []
    most = max(layer.nbytes for _, layer in layers_of(model) if isinstance(layer, Experts))
    return [product("experts of a layer that moves", copies=4, B=most)]


def _decode(case: Case, sketch: Sketch, weights: list[PlanLine], all_experts: int, page_nbytes: int) -> list[PlanLine]:
    """The parts that a decode step reads if its batch is full and all sequences are at their longest. The number of
    different experts is its expected value; of `all_experts` bytes, those with shadows are read on device or host."""
    batch = case.data_config.batch_size
    own = batch // case.attn_dp_size
    rest = sum(part.nbytes for part in weights if part.name not in (*ROWS, *EXPERTS, *GUESSING))
    parts = [PlanLine("all but embedding, experts", rest)]
    experts, chosen = case.parallel_sizes.physical(sketch.config.expert_count), sketch.config.experts_per_token
    if experts:
        here = experts // sketch.build.parallel.moe_ep.size
        share = 1 - (1 - chosen / experts) ** batch
        how = f"{here * share:.1f} of {here} a layer: {here} x (1 - (1 - {chosen} / {experts}) ^ {batch})"
        parts.append(PlanLine("experts hit", round(all_experts * share), how))
    for window in dict.fromkeys(sketch.limits.windows):
        name = "KV of longest sequences" if window is None else f"KV of windows of {window}"
        seen = min(case.max_sequence_length, window or case.max_sequence_length)
        a_token = sketch.limits.windows.count(window) * page_nbytes // case.cache_config.page_size
        parts.append(product(name, tokens=own * seen, B_a_token=a_token))
    return parts
