"""Counts what one rank does in a step: kernels, bytes, products and collectives. The model's own code runs on PyTorch's
meta device, with ops that note what they are asked for, so what is counted is what a run of the same layout does.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from executor.config.case import Case
from executor.config.load import load_model_config
from executor.config.platforms import PLATFORMS
from executor.engine.building import bind_caches, build_of
from executor.engine.settings import platform_settings
from executor.parallel.groups import Group
from executor.parallel.join import place_of
from executor.planning.activations import CountedGroup, batch_of
from executor.platform.ascend.exchange import most_rows, why_gathered
from models.causal_lm import CausalLM
from models.config import ModelConfig, with_layers
from models.layers.attention import PagedAttention
from models.layers.base import layers_of
from models.layers.experts import Experts
from models.registry import load, model_class
from ops import reference
from ops.interface import Exchange, Lengths, Ops

# Kernels that an op launches in a decode graph, where they are not one. tests/ascend/test_eager.py holds Ascend's lists
# against the real wheels: a layer of Qwen3-MoE has 13. On the CPU an op is one native call.
KERNELS: dict[str, dict[str, int]] = {"ascend": {"moe": 5, "write_kv": 2, "split_rms_norm": 6}, "cpu": {}}
EXCHANGED = 6  # kernels of a mixture whose rows are exchanged: dispatch, the experts' three, a cast, combine
IN_SLOTS = 2  # more of them where experts are in slots: a look-up and a count


@dataclass(frozen=True)
class Done:
    """What one op of a step does on a rank, `times` times in a step."""

    name: str
    times: int
    kernels: int
    weights: float = 0.0  # bytes of weights that it reads
    cached: float = 0.0  # bytes of cached keys and values that it reads
    rows: float = 0.0  # bytes of activations that it reads and writes
    macs: float = 0.0  # multiply-adds
    tokens: int = 0  # rows that are multiplied by the weights
    mixture: bool = False  # whether the weights are those of experts


@dataclass(frozen=True)
class Message:
    """A collective of a step, `times` times in a step."""

    kind: str  # all_reduce, all_gather, reduce_scatter, dispatch or combine
    group: str  # name of the rank group
    ranks: int
    nbytes: int  # of this rank's input
    times: int


@dataclass(frozen=True)
class Work:
    """What one rank does in a step."""

    done: tuple[Done, ...]
    messages: tuple[Message, ...]

    def total(self, what: str) -> float:
        """The sum of a field of Done over the step."""
        return sum(float(getattr(done, what)) * done.times for done in self.done)


class Notes:
    """What the ops of a step were asked for, each `multiple` times."""

    def __init__(self) -> None:
        self.done: list[Done] = []
        self.messages: list[Message] = []
        self.multiple = 1


@dataclass(frozen=True)
class NotedGroup(CountedGroup):
    """One whose collectives are noted."""

    name: str = ""
    notes: Notes = dataclasses.field(default_factory=Notes)

    def _note(self, kind: str, x: Tensor) -> None:
        self.notes.messages.append(Message(kind, self.name, self.size, x.nbytes, self.notes.multiple))

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size > 1:
            self._note("all_reduce", x)
        return super().all_reduce(x)

    def _gather(self, x: Tensor) -> Tensor:
        self._note("all_gather", x)
        return super()._gather(x)

    def _sum_parts(self, x: Tensor) -> Tensor:
        self._note("reduce_scatter", x)
        return super()._sum_parts(x)


class NotedOps:
    """The ops of a platform: weights and caches in its layout, results on meta. Every call is noted."""

    paging = staticmethod(reference.paging)

    def __init__(self, case: Case, experts: int, notes: Notes):
        """`experts` is the number of a layer's experts on all ranks, with copies."""
        entry, own = PLATFORMS[case.platform], getattr(torch, case.model_config.dtype)
        self.layout: Any = load(entry.layout)(own)
        self.dtype = torch.float32 if entry.is_host else own  # of activations
        self.page_size = case.cache_config.page_size
        self.kernels, self.experts, self.notes = KERNELS[case.platform], experts, notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layout, name)

    def note(
        self, name: str, *tensors: Tensor, weights: float = 0.0, cached: float = 0.0, macs: float = 0.0, tokens: int = 0
    ) -> None:
        rows = float(sum(t.nbytes for t in tensors))
        kernels = self.kernels.get(name, 1)
        self.notes.done.append(Done(name, self.notes.multiple, kernels, weights, cached, rows, macs, tokens))

    def embedding(self, ids: Tensor, table: Tensor, first_id: int | None) -> Tensor:
        out = table.new_empty(len(ids), table.shape[1], dtype=self.dtype)
        self.note("embedding", out, out)
        return out

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        out = x.new_empty(len(x), weight.rows)
        size, macs = sum(t.nbytes for t in weight.storages), len(x) * weight.rows * weight.columns
        self.note("linear", x, out, weights=size, macs=macs, tokens=len(x))
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.note("rms_norm", x, x)
        return x

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self.note("add_rms_norm", x, x, x, x)
        return x, residual

    def split_rms_norm(
        self, parts: Sequence[Tensor], weights: object, counts: object, eps: float, total: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        total(parts[0].new_empty(len(parts[0]), len(parts), dtype=torch.float32))
        self.note("split_rms_norm", *parts, *parts)
        return list(parts)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        self.note("rope", q, q, k, k)
        return q, k

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, places: Tensor) -> None:
        self.note("write_kv", k, k, v, v)

    def norm_rope_write(self, qkv: Tensor, q_weight: Tensor, *rest: Any) -> Tensor:
        kv_heads, head_dim = rest[4], len(q_weight)
        self.note("norm_rope_write", qkv, qkv)
        return qkv.new_empty(len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads, head_dim)

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, starts: Lengths, lens: Lengths, scale: float
    ) -> Tensor:
        tokens = (k_cache.nbytes + v_cache.nbytes) / (len(k_cache) * self.page_size)  # bytes of a cached token
        pairs = 0.0  # of a new token and one that it sees
        for first, end, length in zip(starts[:-1], starts[1:], lens, strict=True):
            new = int(end) - int(first)
            pairs += new * (int(length) - new) + new * (new + 1) / 2
        self.note("attention", q, q, cached=tokens * sum(map(int, lens)), macs=2 * pairs * q.shape[1] * q.shape[2])
        return q

    def silu_mul(self, x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        self.note("silu_mul", x, out)
        return out

    def route_softmax(self, logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        self.note("route", logits)
        shape = len(logits), top_k
        return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)

    def route_sigmoid(self, logits: Tensor, bias: object, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        return self.route_softmax(logits, top_k, renormalise)

    def moe(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Any, first_expert: int | None) -> Tensor:
        self.mixture("moe", len(x), x, ids.shape[1], experts)
        return x

    def mixture(self, name: str, tokens: int, x: Tensor, top_k: int, experts: Any, kernels: int = 0) -> None:
        """Notes the mixtures of `tokens` tokens, whose experts are spread evenly over all ranks."""
        share = 1 - (1 - top_k / self.experts) ** tokens  # of the experts, that the tokens use
        pairs = tokens * top_k * experts.count / self.experts
        width, matrix = x.shape[1], experts.inner * x.shape[1]
        rows = x.itemsize * pairs * (4 * width + 4 * experts.inner)  # in expert order, gate and up, product, result
        weights = share * sum(t.nbytes for t in experts.storages)
        launched = kernels or self.kernels.get(name, 1)
        done = Done(name, self.notes.multiple, launched, weights, 0.0, rows, 3 * pairs * matrix, tokens, mixture=True)
        self.notes.done.append(done)


class NotedExchange:
    """The exchange of experts' rows over `size` ranks: steps of at most `most` rows."""

    uneven = False

    def __init__(self, ops: NotedOps, size: int, most: int):
        self.ops, self.size, self.most = ops, size, most

    def takes(self, rows: int, experts: object) -> bool:
        return 0 < rows <= self.most

    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Any, slots: object = None) -> Tensor:
        notes, top_k = self.ops.notes, ids.shape[1]
        kernels = EXCHANGED + (IN_SLOTS if slots else 0)
        for kind in ("dispatch", "combine"):
            notes.messages.append(Message(kind, "world", self.size, top_k * x.nbytes, notes.multiple))
        self.ops.mixture("exchanged moe", self.size * len(x), x, top_k, experts, kernels)
        return x


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds."""

    experts: int
    rest: int  # all other weights
    token: float  # keys and values of a token, in all layers


class Counted:
    """The rank of a layout whose steps are counted: rank 0 of `case`, which stands for all."""

    def __init__(self, case: Case):
        self.case, self.notes = case, Notes()
        self.config = load_model_config(case)
        config, self.multiples = one_of_each_layer(self.config)
        self.ops = ops = NotedOps(case, case.parallel_sizes.physical(config.expert_count), self.notes)
        place = place_of(case.parallel_sizes, 0, {})
        groups = {field.name: getattr(place, field.name) for field in dataclasses.fields(place)}
        noted: dict[str, Any] = {
            n: NotedGroup(g.rank, g.size, None, n, self.notes) for n, g in groups.items() if isinstance(g, Group)
        }
        parallel = dataclasses.replace(place, **noted)
        settings = platform_settings(case)
        if case.platform == "ascend":
            exchanged = 0 if why_gathered(settings, config) else most_rows(settings)
        else:
            exchanged = sys.maxsize if case.parallel_sizes.expert_slots else 0
        exchange = NotedExchange(ops, case.world_size, exchanged) if exchanged else None
        head = PLATFORMS[case.platform].quantised_head
        meta = torch.device("meta")
        build = build_of(case, cast(Ops, ops), parallel, meta, head, None, cast("Exchange | None", exchange))
        self.model: CausalLM = model_class(case.model_name)(config, build)
        bind_caches(self.model, case, build, 2)
        for layer, multiple in zip(self.model.model.layers, self.multiples, strict=True):
            layer.register_forward_pre_hook(partial(self._begin, multiple))
            layer.register_forward_hook(partial(self._begin, 1))

    def _begin(self, multiple: int, *_: object) -> None:
        self.notes.multiple = multiple

    @property
    def memory(self) -> Memory:
        experts = rest = 0
        for path, layer in layers_of(self.model):
            size = sum(t.nbytes for t in layer.storages()) * self._multiple(path)
            if isinstance(layer, Experts):
                experts += size
            else:
                rest += size
        token = 0.0
        for path, module in self.model.named_modules():
            if isinstance(module, PagedAttention):
                caches = module.k_cache.nbytes + module.v_cache.nbytes
                token += self._multiple(path) * caches / len(module.k_cache) / self.ops.page_size
        return Memory(experts, rest, token)

    @property
    def expert_layers(self) -> int:
        return sum(self._multiple(path) for path, layer in layers_of(self.model) if isinstance(layer, Experts))

    def _multiple(self, path: str) -> int:
        parts = path.split(".")
        return self.multiples[int(parts[2])] if parts[:2] == ["model", "layers"] else 1

    def decode(self, sequences: int, cached: int) -> Work:
        """A decode step of `sequences` sequences of this rank's group, each with `cached` tokens before it."""
        return self._step(sequences, sequences, cached + 1)

    def prefill(self, tokens: int, cached: int) -> Work:
        """A prefill step of `tokens` tokens of one sequence, with `cached` tokens before them."""
        return self._step(tokens, 1, cached + tokens)

    @torch.inference_mode()
    def _step(self, tokens: int, sequences: int, length: int) -> Work:
        groups, page_size = self.case.attn_dp_size, self.ops.page_size
        decode = tokens == sequences
        batch = batch_of(cast(Ops, self.ops), tokens, sequences, 1, page_size, groups)
        batch = dataclasses.replace(
            batch,
            kv_lens=(length,) * sequences,
            logit_rows=None if decode else batch.logit_rows,
            wanted_per_group=None if decode else (sequences,) * groups,
        )
        self.notes.done, self.notes.messages = [], []
        self.model(batch)
        return Work(tuple(self.notes.done), tuple(self.notes.messages))


def one_of_each_layer(config: ModelConfig) -> tuple[ModelConfig, tuple[int, ...]]:
    """The config with the last layer and one of each kind of layers before it, and how many layers of `config` each of
    these stands for."""
    fields: Any = config
    *kinds, last = getattr(config, "sparse_layers", (True,) * fields.num_hidden_layers)
    counts = Counter(kinds)
    return with_layers(config, (*counts, last)), (*counts.values(), 1)
