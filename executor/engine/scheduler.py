"""Decides which sequences run in the next step, and with how many tokens. It handles requests and pages only; no model,
device or clock is involved.

Every rank runs the same scheduler on the same calls, so all ranks agree without a message: each data-parallel group has
its own pool of pages and an equal share of the batch.

Shadow experts do not change that, although on each rank copies end at other times, other experts are resident and other
pages are free. Admission depends on how many pages a pool may hand out at most and on how long sequences may become,
not on which experts are resident; pages that were promised can always be had, because experts are evicted for them
(ElasticPages). The number of pages is the same on all ranks: all have as many experts of the same size, and an arena of
one size. The page numbers differ: a rank packs the block tables of its own group only, for its own cache, and counts
the pages of the other groups with PagePools that no cache belongs to.
"""

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from errors import UserError
from executor.config.case import Case
from executor.engine.pages import PagePool, Pages
from executor.engine.request import Event
from executor.engine.sequence import Sequence


@dataclass(frozen=True)
class Limits:
    batch_size: int  # most sequences that run together, in all data-parallel groups
    max_sequence_length: int  # most prompt and generated tokens of a sequence
    page_size: int
    groups: int = 1  # data-parallel groups
    prefill_tokens: int | None = None  # most prompt tokens of each group in a step; None: no limit
    mixed_tokens: int | None = None  # the same for a step in which other sequences decode


@dataclass(frozen=True)
class Step:
    """The sequences of one step, ordered by group. `new_tokens` of a sequence is the number of tokens it takes."""

    sequences: list[Sequence]

    @property
    def decode(self) -> bool:
        """Whether every sequence takes exactly its newest token. Graphs are captured of such steps only."""
        return all(s.decoding for s in self.sequences)

    @property
    def finished_prompts(self) -> list[Sequence]:
        """The sequences that have all their tokens cached after the step, so that it chooses their next token."""
        return [s for s in self.sequences if s.complete]


class Scheduler:
    def __init__(self, limits: Limits, stop_ids: Collection[int] = (), pool: Pages | None = None, group: int = 0):
        """`stop_ids` are the model's end-of-sequence tokens. `pool` holds the pages of this rank's `group`, if they are
        fewer than the worst case takes; all groups then have the same number of pages."""
        self.limits, self.stop_ids = limits, frozenset(stop_ids)
        self.per_group = limits.batch_size // limits.groups
        self.table_width = -(-limits.max_sequence_length // limits.page_size)  # number of pages of the longest sequence
        self.pages = self.per_group * self.table_width  # pages of a group, enough for the worst case
        pages = pool.pages if pool else self.pages
        self.pools: list[Pages] = [PagePool(pages, limits.page_size) for _ in range(limits.groups)]
        if pool:
            self.pools[group] = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # ordered by group, in a group by admission

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue `sequence`. A sequence that can never run is refused here; other sequences are not affected."""
        longest, allowed = sequence.longest, self.limits.max_sequence_length
        if not sequence.ids:
            raise UserError(f"prompt {sequence.id} has no tokens")
        if longest > allowed:
            raise UserError(
                f"prompt {sequence.id}: {sequence.prompt_len} tokens and max_tokens {longest - sequence.prompt_len} "
                f"are more than the {allowed} that a sequence can have: shorten it, or raise input_max_len or "
                "max_new_tokens"
            )
        pool = self.pools[0]  # all pools have the same number of pages
        needed = pool.pages_for(longest)
        if needed > pool.pages:
            raise UserError(
                f"KV cache: prompt {sequence.id} may need {needed} pages of {pool.page_size} tokens, sequences can "
                f"have {pool.pages}"
            )
        self.waiting.append(sequence)

    def abort(self, id: int) -> Event | None:
        """End a request between two steps; None if it has ended already."""
        for sequence in (*self.waiting, *self.running):
            if sequence.id == id:
                sequence.finish_reason = "abort"
                if sequence in self.waiting:
                    self.waiting.remove(sequence)
                self.retire()
                return Event(id, (), "abort")
        return None

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free places, emptiest group first. The step that is being scheduled starts
        their prefill.

        A sequence is admitted only while its pool has pages for all sequences of the group at their longest, so that
        each can grow to its end.
        """
        load = [sum(s.group == g for s in self.running) for g in range(len(self.pools))]
        promised = [sum(self._most_pages(s) for s in self.running if s.group == g) for g in range(len(self.pools))]
        admitted: list[Sequence] = []
        while self.waiting and min(load) < self.per_group:
            sequence, group = self.waiting[0], load.index(min(load))
            needed = self._most_pages(sequence)
            if promised[group] + needed > self.pools[group].pages:
                break  # first come, first served: all later sequences wait as well
            self.waiting.popleft()
            sequence.group = group
            load[group] += 1
            promised[group] += needed
            admitted.append(sequence)
        admitted.sort(key=lambda s: s.group)
        self.running = sorted(self.running + admitted, key=lambda s: s.group)
        return admitted

    def schedule(self) -> Step | None:
        """Returns the next step; None if nothing is left to do.

        Sequences that decode take one token each, and prompts fill up the step within their limit: the smaller one
        while any sequence decodes, so that a long prompt does not keep it waiting.
        """
        self.admit()
        decoding = any(s.decoding for s in self.running)
        limit = self.limits.mixed_tokens if decoding else self.limits.prefill_tokens
        prompts = set(self.chunk([s for s in self.running if not s.decoding], limit))
        step = [s for s in self.running if s.decoding or s in prompts]
        return Step(step) if step else None

    def chunk(self, prompts: ListOf[Sequence], limit: int | None) -> list[Sequence]:
        """Those of `prompts` that take tokens in the next step, the first ones first: at most `limit` tokens of each
        data-parallel group; None: all tokens."""
        left: list[int | None] = [limit] * len(self.pools)
        part = []
        for sequence in prompts:
            room = left[sequence.group]
            if room != 0:
                sequence.limit = room
                if room is not None:
                    left[sequence.group] = room - sequence.new_tokens
                part.append(sequence)
        return part

    def reserve(self, sequences: Iterable[Sequence]) -> None:
        """Give each sequence the pages that its next step writes to."""
        for sequence in sequences:
            self.pools[sequence.group].extend(sequence.pages, sequence.end)

    def commit(self, step: Step, tokens: ListOf[int]) -> list[Event]:
        """Record that `step` ran, and that it chose `tokens` for its `finished_prompts`, in their order."""
        finished = step.finished_prompts
        for sequence in step.sequences:
            sequence.cached, sequence.limit = sequence.end, None
        for sequence, token in zip(finished, tokens, strict=True):
            sequence.ids.append(token)
            sampling = sequence.request.sampling
            if token in sampling.stop_token_ids or (token in self.stop_ids and not sampling.ignore_eos):
                sequence.finish_reason = "stop"
            elif len(sequence.generated) >= sampling.max_tokens:
                sequence.finish_reason = "length"
        self.retire()
        return [Event(s.id, (token,), s.finish_reason) for s, token in zip(finished, tokens, strict=True)]

    def retire(self) -> list[Sequence]:
        """Remove the sequences that have finished, take back their pages, and return those sequences."""
        finished = [s for s in self.running if s.finish_reason]
        for sequence in finished:
            self.pools[sequence.group].release(sequence.pages)
        self.running = [s for s in self.running if not s.finish_reason]
        return finished

    def _most_pages(self, sequence: Sequence) -> int:
        return self.pools[0].pages_for(sequence.longest)


def limits_of(case: Case) -> Limits:
    data = case.data_config
    sizes = [size for size in (data.chunked_prefill_size, data.mixed_prefill_size) if size]
    return Limits(
        batch_size=data.batch_size,
        max_sequence_length=case.max_sequence_length,
        page_size=case.cache_config.page_size,
        groups=case.attn_dp_size,
        prefill_tokens=data.chunked_prefill_size,
        mixed_tokens=min(sizes, default=None),
    )
