"""Counts what one rank does in a step: kernels, bytes, products and collectives. The model's own code runs on PyTorch's
meta device, with ops that note what they are asked for, so what is counted is what a run of the same layout does.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from umbra.base.errors import UserError
from umbra.executor.config.case import Case
from umbra.executor.config.load import load_model_config
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.plan.activations import CountedGroup, batch_of
from umbra.executor.plan.batch_limits import limits_of
from umbra.executor.plan.counting import counting_of
from umbra.executor.plan.kv_caches import bind_caches, frame_of, recurrent, sets_of, state_sizes
from umbra.executor.plan.weight_formats import build_of
from umbra.models.causal_lm import CausalLM
from umbra.models.config import ModelConfig, with_layers
from umbra.models.eagle3_config import TAPS
from umbra.models.layers.base import layers_of
from umbra.models.layers.experts import Experts
from umbra.models.layers.states import LayerStates
from umbra.models.registry import load, model_class
from umbra.ops.counted import Collective, CountedExchange, CountedOps, Done, Notes
from umbra.ops.interface import Exchange, Ops
from umbra.ops.parallel.groups import Group
from umbra.ops.parallel.join import parallel_of


@dataclass(frozen=True)
class RankWork:
    """The work of one rank in a step."""

    done: tuple[Done, ...]
    messages: tuple[Collective, ...]

    def total(self, what: str) -> float:
        """The sum of a field of Done over the step."""
        return sum(float(getattr(done, what)) * done.times for done in self.done)


@dataclass(frozen=True)
class NotedGroup(CountedGroup):
    """One whose collectives are noted."""

    name: str = ""
    notes: Notes = dataclasses.field(default_factory=Notes)

    def _note(self, kind: str, x: Tensor) -> None:
        self.notes.messages.append(Collective(kind, self.name, self.size, x.nbytes, self.notes.multiple))

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


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds."""

    experts: int
    rest: int  # all other weights
    page: int  # a KV page of all layers of a set (executor/plan/layer_sets.py)


class CountedRank:
    """The rank of a layout whose steps are counted: rank 0 of `case`, which stands for all."""

    def __init__(self, case: Case):
        self.case, self.config = case, load_model_config(case)
        config, self.multiples = one_of_each_layer(self.config)
        facts, own = PLATFORMS[case.platform], getattr(torch, case.model_config.dtype)
        counting = counting_of(case, config)
        self.ops = ops = CountedOps(
            load(facts.layout)(own),
            getattr(torch, facts.activations or case.model_config.dtype),
            case.cache_config.page_size,
            case.parallel_sizes.physical(config.expert_count),
            counting.costs,
        )
        self.notes = ops.notes
        own = parallel_of(case.parallel_sizes, 0, {})
        groups = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
        noted: dict[str, Any] = {
            n: NotedGroup(g.rank, g.size, None, n, self.notes) for n, g in groups.items() if isinstance(g, Group)
        }
        parallel = dataclasses.replace(own, **noted)
        exchange = CountedExchange(ops, case.world_size, counting.exchanged) if counting.exchanged else None
        meta = torch.device("meta")
        build = build_of(
            case, cast(Ops, ops), parallel, meta, facts.quantised_head, None, cast("Exchange | None", exchange)
        )
        self.model: CausalLM = model_class(case.model_name)(config, build)
        bind_caches(self.model, case, build, 2)
        own = (None,) * bool(self.model.mtp_at)  # the window of a layer that predicts further tokens
        frame = frame_of(self.model, case, build, (*self.config.windows, *own))
        self.units, self.page_bytes = frame.units, frame.nbytes + frame.beside
        stateful = sum(self._multiple(path) for path, m in self.model.named_modules() if isinstance(m, LayerStates))
        self.states = state_sizes(self.model, self.page_bytes // self.units, stateful)
        self.limits = limits_of(case, self.config, True, self.states.frames(self.page_bytes, 0))
        layers = list(self.model.model.layers)[: self.model.model.depth]
        for layer, multiple in zip(layers, self.multiples, strict=True):
            layer.register_forward_pre_hook(partial(self._begin, multiple))
            layer.register_forward_hook(partial(self._begin, 1))

    def _begin(self, multiple: int, *_: object) -> None:
        self.notes.multiple = multiple

    @property
    def memory(self) -> Memory:
        experts = rest = 0
        for path, layer in layers_of(self.model):
            size = sum(t.nbytes for t in layer.storages()) * self._multiple(path)
            if self._shared_out(path, layer):
                experts += size
            else:
                rest += size
        return Memory(experts, rest, self.page_bytes)

    @property
    def expert_layers(self) -> int:
        return sum(self._multiple(path) for path, layer in layers_of(self.model) if self._shared_out(path, layer))

    def _shared_out(self, path: str, layer: nn.Module) -> bool:
        """Returns whether hosts may hold some of the experts of `layer`. Experts of a layer for multi-token prediction
        are all on the devices."""
        mtp = self.model.mtp_at
        return isinstance(layer, Experts) and not (mtp and path.startswith(f"{mtp}."))

    def _multiple(self, path: str) -> int:
        parts = path.split(".")
        inside = parts[:2] == ["model", "layers"] and int(parts[2]) < len(self.multiples)
        return self.multiples[int(parts[2])] if inside else 1

    def decode(self, sequences: int, cached: int, guesses: int = 0) -> RankWork:
        """A decode step of `sequences` sequences of this rank's group, each with `cached` tokens before it, that checks
        `guesses` guesses of each, and as many new ones: a guess takes all rows first, then a row of each sequence."""
        rows = sequences * (1 + guesses)
        steps = [self._step(rows, rows, cached + 1)]
        if guesses:
            steps += [
                self._guess(rows, sequences, cached + 1, 1, first=True),
                self._guess(sequences, sequences, cached + 1, guesses - 1),
            ]
        return RankWork(sum((step.done for step in steps), ()), sum((step.messages for step in steps), ()))

    def prefill(self, tokens: int, cached: int) -> RankWork:
        """A prefill step of `tokens` tokens of one sequence, with `cached` tokens before them."""
        return self._step(tokens, 1, cached + tokens)

    @torch.inference_mode()
    def _guess(self, rows: int, sequences: int, length: int, times: int, first: bool = False) -> RankWork:
        """`times` guesses of a token of each of `sequences`, from `rows` rows; `first`: of a step's."""
        if not self.model.guesses:
            raise UserError(
                f"case {self.case.name}: draft_config.method: none: no speculative decoding is set: set mtp or eagle3"
            )
        head, page_size = self.model.eagle3, self.ops.page_size
        groups, sets = self.case.attn_dp_size, len(sets_of(self.model)) + bool(head)
        batch = batch_of(cast(Ops, self.ops), rows, rows, 1, page_size, groups, sets)
        batch = dataclasses.replace(
            batch,
            paged=tuple(paged._replace(kv_lens=(length,) * rows) for paged in batch.paged),
            hidden=torch.empty(rows, self.model.state_width, dtype=self.ops.dtype, device="meta"),
            logit_rows=torch.empty(sequences, dtype=torch.int64, device="meta"),
            wanted_per_group=(sequences,) * groups,
        )
        self.notes.done, self.notes.messages, self.notes.multiple = [], [], times
        if head and first:
            tapped = torch.empty(rows, head.config.target_hidden_size, dtype=self.ops.dtype, device="meta")
            head.fused([tapped] * TAPS, batch)
        self.model.guess(batch)
        self.notes.multiple = 1
        done = tuple(dataclasses.replace(one, mixture=False) for one in self.notes.done)
        return RankWork(done, tuple(self.notes.messages))

    @torch.inference_mode()
    def _step(self, tokens: int, sequences: int, length: int) -> RankWork:
        groups, page_size = self.case.attn_dp_size, self.ops.page_size
        decode = tokens == sequences
        sets, stateful = len(sets_of(self.model)), len(recurrent(self.model))
        expanded = not decode and self.limits.expansion is not None and self.limits.expansion.pays(0, tokens)
        batch = batch_of(cast(Ops, self.ops), tokens, sequences, 1, page_size, groups, sets, stateful, expanded)
        before = self.model.previous
        batch = dataclasses.replace(
            batch,
            paged=tuple(paged._replace(kv_lens=(length,) * sequences) for paged in batch.paged),
            previous=torch.empty(tokens, before, dtype=torch.int64, device="meta") if before else None,
            logit_rows=None if decode else batch.logit_rows,
            wanted_per_group=None if decode else (sequences,) * groups,
        )
        self.notes.done, self.notes.messages = [], []
        self.model(batch)
        return RankWork(tuple(self.notes.done), tuple(self.notes.messages))


def one_of_each_layer(config: ModelConfig) -> tuple[ModelConfig, tuple[int, ...]]:
    """The config with the last layer and one of each kind of layers before it, and how many layers of `config` each of
    these stands for."""
    layers, windows = config.num_hidden_layers, iter(config.windows)
    sparse, linear = (getattr(config, f"{kind}_layers", (False,) * layers) for kind in ("sparse", "linear"))
    kinds = [(one, other, None if other else next(windows)) for one, other in zip(sparse, linear, strict=True)]
    counts = Counter(kinds[:-1])
    return with_layers(config, [*map(kinds.index, counts), len(kinds) - 1]), (*counts.values(), 1)
