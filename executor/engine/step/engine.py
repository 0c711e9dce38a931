"""One rank's model on its device, with its KV cache: turns batches into logits. The scheduler handles requests."""

import functools
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from umbra.cpu_offload.planner.choices import Choices
from umbra.executor.checkpoint.packed import PackedCache
from umbra.executor.checkpoint.stop_ids import stop_ids
from umbra.executor.config.case import Case
from umbra.executor.config.load import model_folder
from umbra.executor.engine.memory.arena import open_arena
from umbra.executor.engine.memory.page_memory import PageMemory
from umbra.executor.engine.memory.pages import PagePool, Pages
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.batching import Packer, StepShape
from umbra.executor.engine.step.profiler import Profiler
from umbra.executor.engine.step.rebalancing import Rebalancing
from umbra.executor.engine.step.sampling import choose, logprobs_of
from umbra.executor.engine.step.shadows import make_shadow_experts
from umbra.executor.engine.step.weights import fill_weights
from umbra.executor.plan.arena_sizes import set_pages_of
from umbra.executor.plan.batch_limits import limits_of
from umbra.executor.plan.kv_caches import attentions, bind_caches, parts_of_pages, recurrent
from umbra.executor.plan.weight_formats import build_of
from umbra.executor.platform.base import Platform
from umbra.models.batch import Batch
from umbra.models.config import ModelConfig
from umbra.models.layers.base import layers_of
from umbra.models.registry import model_class
from umbra.ops.parallel.groups import Parallel

if TYPE_CHECKING:
    from umbra.executor.engine.schedule.grammar import Grammars

ForwardStep = Callable[[Batch], Any]  # -> logits or, of a model that guesses tokens, logits and hidden states


class Engine:
    """`config` is the model's config. `choices` are the choices of the planner for shadow experts, or None for a case
    without them. `packed_cache` makes the cache of packed weights from the arguments of PackedCache."""

    def __init__(
        self,
        case: Case,
        platform: Platform,
        parallel: Parallel,
        config: ModelConfig,
        profiler: Profiler,
        choices: Choices | None = None,
        packed_cache: Callable[..., PackedCache] = PackedCache,
    ):
        start, rank = time.perf_counter(), parallel.world.rank
        self.case, self.platform, self.parallel, self.config = case, platform, parallel, config
        self.profiler = profiler
        self.shadows = make_shadow_experts(case, choices, platform, config) if choices else None
        exchange = None if self.shadows else platform.exchange(config)
        device, quantised_head = platform.device, platform.quantised_head
        build = build_of(case, platform.ops, parallel, device, quantised_head, self.shadows, exchange)
        self.model = model_class(case.model_name)(config, build)
        self.kernels = platform.kernels(self.model)
        for what, kernel in self.kernels.items() if rank == 0 else ():
            print(f"{what}: {kernel}")
        fill_weights(case, model_folder(case), self.model, rank, packed_cache)
        slots = (self.shadows.slot_bytes, self.shadows.device.alignment) if self.shadows else ()
        set_pages = set_pages_of(self.model, case, build, *slots)
        limits = limits_of(case, config, True, set_pages)
        self.aside = bool(attentions(self.model, aside=True))
        if self.shadows or set_pages:
            opened = open_arena(case, build, self.model, self.shadows, limits)
            self.pages: Pages = opened[0]
            self.page_memory = opened[1]
        else:
            caches, states = bind_caches(self.model, case, build, limits.pages)
            self.page_memory = PageMemory(caches, 1, states, [of.elements for of in recurrent(self.model)])
            self.pages = PagePool(limits.pages, limits.page_size)
        state_layers = len(recurrent(self.model))
        parts, previous = parts_of_pages(self.model, case, build), self.model.previous
        self.packer = Packer(platform.ops, self.pages, limits.table_width, parts, state_layers, previous)
        balanced, interval = case.parallel_config.expert_slots > 0, case.parallel_config.rebalance_steps
        self.rebalancing = Rebalancing(self.model, parallel.world, interval) if balanced else None
        self._packed: ListOf[ListOf[Sequence]] = ()  # the sequences of this step, of each group
        self.hidden: Tensor | None = None  # hidden states of the last step's rows, of a model that guesses tokens
        self.decode_step: ForwardStep = self.eager_step
        size = sum(layer.nbytes for _, layer in layers_of(self.model))
        print(f"model ready: {size / 1e6:.1f} MB of weights on this rank, {time.perf_counter() - start:.2f} s")

    @property
    def _step(self) -> ForwardStep:
        return self.model.with_hidden if self.model.guesses else self.model.forward

    def eager_step(self, batch: Batch) -> Any:
        """Runs a step op by op."""
        return self._step(batch.to(self.platform.device))

    def graph_step(self) -> ForwardStep:
        """Returns a decode step that runs as static graphs, one for each number of sequences, as `exe_mode` says."""
        return self.platform.compile(self._step, self.config)

    def pack(
        self, groups: ListOf[ListOf[Sequence]], decode: bool, all_logits: bool = False, hidden: bool = False
    ) -> Batch:
        """Returns the batch of this rank's group. `groups` are the sequences of a step in each data-parallel group, all
        of which have the cache pages that the step writes to. `hidden`: tokens are guessed from its hidden states."""
        shape = self._shape(groups, decode, all_logits, hidden)
        batch = self.packer.pack(groups[self.parallel.attn_dp.rank], shape)
        if self.shadows:
            self.shadows.started(shape.tokens_per_group, [[s.new_tokens for s in group] for group in groups])
            self._packed = groups
        return batch

    def _shape(self, groups: ListOf[ListOf[Sequence]], decode: bool, all_logits: bool, hidden: bool) -> StepShape:
        rank = self.parallel.attn_dp.rank
        counts = tokens = tuple(sum(s.new_tokens for s in group) for group in groups)
        rows = self.platform.padded_rows(max(tokens)) if decode else 0
        if rows:
            tokens = (rows,) * len(groups)
        shared = not decode and self.case.parallel_config.sequence_parallel(min(tokens))
        if shared:
            tokens = tuple(self.parallel.attn_tp.padded(count) for count in tokens)
            rows = len(groups[rank]) + tokens[rank] - counts[rank]
        # Shares of rows are made for all tokens of a step, and so are experts' shadows on some devices.
        # A draft model takes the hidden states of all rows.
        all_rows = self.shadows is not None and not self.shadows.device.narrows
        narrow = not (all_logits or decode or shared or all_rows or hidden)
        return StepShape(
            tokens,
            decode=decode,
            all_logits=all_logits or decode,
            rows=rows,
            sequence_parallel=shared,
            wanted_per_group=tuple(sum(s.logit_rows for s in group) for group in groups) if narrow else None,
            aside=self.aside and (hidden or not self.platform.small_graphs),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, decode: bool) -> Tensor:
        """Returns the logits of this rank's data-parallel group. The device may still be computing them; reading the
        chosen tokens waits for it."""
        with self.profiler.step("decode" if decode else "prefill"):
            output = self.decode_step(batch) if decode else self.eager_step(batch)
        if self.model.guesses:
            output, self.hidden = output
        logits: Tensor = output
        return logits

    def choose(self, logits: Tensor, groups: ListOf[ListOf[Sequence]]) -> list[int]:
        """Returns the tokens chosen after the newest and each drafted token of each sequence of `groups`, the
        data-parallel groups. `logits` has as many rows for this rank's group."""
        dp = self.parallel.attn_dp
        counts = tuple(sum(1 + s.drafted for s in of) for of in groups)
        chosen = choose(self.platform.ops, logits[: counts[dp.rank]], groups[dp.rank])
        tokens: list[int] = dp.gather_rows(chosen, counts).tolist()
        return tokens

    def logprobs(self, logits: Tensor, tokens: ListOf[int], counts: tuple[int, ...], most: int) -> list[list[float]]:
        """The rows of `logprobs_of` for all data-parallel groups, of which group g has counts[g]. `logits` and `tokens`
        are of this rank's group."""
        dp = self.parallel.attn_dp
        rows = logprobs_of(logits, torch.tensor(tokens, dtype=torch.int64, device=logits.device), most)
        gathered: list[list[float]] = dp.gather_rows(rows, counts).tolist()
        return gathered

    @functools.cached_property
    def grammars(self) -> "Grammars":
        """Made when the first request has a grammar: it takes seconds for a large vocabulary."""
        from umbra.executor.engine.schedule.grammar import Grammars

        folder = model_folder(self.case)
        return Grammars.read(folder, self.config.vocab_size, stop_ids(folder, self.config.eos_token_ids))

    @contextmanager
    def step(self, decode: bool) -> Iterator[None]:
        """Context of one step, entered before the step's pages are reserved and left once its tokens are known. Experts
        change places only between two steps."""
        if self.shadows:
            self.shadows.begin()
        yield
        if self.shadows:
            running = (s for of in self._packed for s in of if s.decoding and not s.finish_reason)
            self.shadows.end(decode, [s.ids[-1] for s in running])
        if self.rebalancing:
            self.rebalancing.end()
