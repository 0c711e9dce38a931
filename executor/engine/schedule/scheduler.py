"""Decides which sequences run in the next step, and with how many tokens. It handles requests and pages only; no model,
device or clock is involved.

Every rank runs the same scheduler on the same calls, so all ranks agree without a message: each data-parallel group has
its own pool of pages and an equal share of the batch.

Shadow experts do not change that, although on each rank copies end at other times, other experts are resident and other
pages are free. Decisions depend only on how many pages a pool may hand out at most, and on how many of them are held,
promised and kept, not on which experts are resident; pages within that number can always be had, because experts are
evicted for them (ElasticPages). The number of pages is the same on all ranks: all have as many experts of the same
size, and an arena of one size. The page numbers differ: a rank packs the block tables of its own group only, for its
own cache, and counts the pages of the other groups with PagePools that no cache belongs to.

Who gives way. The pages of a group are committed (held by sequences or promised to them), kept (prefixes of sequences
that have ended, for later prompts), or neither; experts live in those. As sequences grow, kept prefixes are dropped
first, down to `prefix_floor` pages, as long as fewer than `expert_pages` are left for experts; then experts are
evicted; then the other prefixes are dropped; and then the youngest sequence is preempted: it gives back its pages and
waits, and later computes them again, as far as they are no longer kept.
"""

import bisect
import hashlib
import itertools
from array import array
from collections.abc import Collection, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from functools import partial

from umbra.base.errors import UserError
from umbra.executor.config.case import MOST_DRAFTING
from umbra.executor.engine.drafts.drafts import Drafts
from umbra.executor.engine.memory.pages import PagePool, Pages
from umbra.executor.engine.memory.prefixes import PageCache, extend_keys, key_of
from umbra.executor.engine.schedule.request import Event
from umbra.executor.engine.schedule.sequence import FAILED, Sequence
from umbra.executor.engine.schedule.states import advance, cut, leave, passes_page, prepare, want_checkpoints
from umbra.executor.plan.batch_limits import Limits

MOST_SCORED = 256  # prompt tokens of a sequence in a step, if their log-probabilities are wanted
MOST_PREEMPTIONS = 4  # of one sequence; it then waits until it can be promised all pages it will need


@dataclass
class Step:
    """The sequences of one step, ordered by group. `new_tokens` of a sequence is the number of tokens it takes."""

    sequences: list[Sequence]
    # Whether every sequence takes exactly its newest token, and drafted ones. Graphs are of such steps only.
    decode: bool

    def __post_init__(self) -> None:
        # The sequences that have all their tokens cached after the step, so that it chooses their next token.
        self.finished_prompts = self.sequences if self.decode else [s for s in self.sequences if s.complete]


class Scheduler:
    def __init__(self, limits: Limits, stop_ids: Collection[int] = (), pool: Pages | None = None, group: int = 0):
        """`stop_ids` are the model's end-of-sequence tokens. `pool` holds the pages of this rank's `group`, if they are
        fewer than the worst case takes; all groups then have the same number of pages."""
        self.limits, self.stop_ids = limits, frozenset(stop_ids)
        pages = pool.pages if pool else limits.pages
        self.pools: list[Pages] = [PagePool(pages, limits.page_size, limits.set_pages) for _ in range(limits.groups)]
        if pool:
            self.pools[group] = pool
        self.caches = [PageCache(pool) for pool in self.pools]
        self.expert_pages = 0  # pages of each group that kept prefixes leave to experts
        self._left_to_experts = 0  # `expert_pages` at the last step
        self.windowed = any(window is not None for window in limits.windows)
        self.mixed_tokens = limits.mixed_tokens
        self.waiting: list[Sequence] = []  # by priority and arrival
        self.running: list[Sequence] = []  # ordered by group, in a group by admission
        self.preempted: list[Sequence] = []  # by the last `schedule`
        self.drafts: Drafts[Sequence] | None = Drafts(limits.draft_tokens) if limits.draft_tokens else None
        self._arrivals = itertools.count()

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
        needed = self.limits.pages_of(longest)
        if needed > pool.pages:
            raise UserError(
                f"prompt {sequence.id} needs up to {needed} KV pages of {pool.page_size} tokens, the cache has "
                f"{pool.pages}: lower max_new_tokens or input_max_len, or raise offload_config.arena_mb"
            )
        sequence.arrival = next(self._arrivals)
        sampling = sequence.request.sampling
        sequence.ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.stop_ids)
        self._wait(sequence)

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
        """Move waiting sequences into the batch, emptiest group first. The step that is being scheduled starts
        their prefill.

        A sequence is admitted only while its pool has all pages that were promised to the group's sequences and those
        that this one is promised.
        """
        load = [sum(s.group == g for s in self.running) for g in range(len(self.pools))]
        admitted: list[Sequence] = []
        while self.waiting and min(load) < self.limits.per_group:
            sequence, group = self.waiting[0], load.index(min(load))
            cache = self.caches[group]
            if self.limits.prefixes:
                extend_keys(sequence.keys, sequence.ids, self.limits.page_size, sequence.request.salt)
            keys = [] if sequence.scored else sequence.keys
            prefix = cache.find(keys, len(sequence.ids), self.limits.windows)
            held, hits = prefix.held, prefix.blocks
            covered = self._covered(sequence)
            promised = self.limits.pages_of(covered)
            shared = sum(block.holders > 0 and not block.passing for block in hits)
            if self.committed(group) + promised - shared > self.pools[group].pages:
                break  # first come, first served: all later sequences wait as well
            self.waiting.pop(0)
            cache.count_missed(keys[held[0].end :])
            cache.hold(hits)
            sequence.group, sequence.held, sequence.promised, sequence.covered = group, held, promised, covered
            sequence.published, sequence.num_computed = held[0].end, held[0].end * self.limits.page_size
            sequence.recurrent.states, sequence.recurrent.at = prefix.states, sequence.num_computed
            sequence.taken = sequence.num_computed
            if self.limits.set_pages and self.limits.prefixes:
                want_checkpoints(sequence, prefix.pages * self.limits.page_size, self.limits.page_size)
            if not sequence.preemptions:
                self._count_cached(sequence)
            load[group] += 1
            admitted.append(sequence)
            bisect.insort(self.running, sequence, key=lambda s: s.group)
            self._trim(group)
        admitted.sort(key=lambda s: s.group)
        return admitted

    def _count_cached(self, sequence: Sequence) -> None:
        """Records how much of a prompt need not be computed."""
        sequence.cached_tokens = cached = sequence.num_computed
        length, expansion = sequence.prompt_len, self.limits.expansion
        sequence.expanded = length if expansion and expansion.pays(cached, length - cached) else 0

    def by_group(self, sequences: ListOf[Sequence]) -> list[ListOf[Sequence]]:
        """Returns the part of `sequences` that each data-parallel group runs."""
        if len(self.pools) == 1:
            return [sequences]
        return [[s for s in sequences if s.group == group] for group in range(len(self.pools))]

    def committed(self, group: int) -> int:
        """Number of pages that the sequences of a group hold or were promised. Pages of windows, which they share only
        until their windows move on, count for each of them."""
        more = (s.promised - s.pages for s in self.running if s.group == group)
        return self.caches[group].held + self.caches[group].shared_in_passing + sum(more)

    def _covered(self, sequence: Sequence) -> int:
        """Number of tokens, in whole pages, for which a sequence is promised pages when it is admitted. One that was
        preempted often is promised all that it can ever need."""
        reserve, size = self.limits.reserve, self.limits.page_size
        if reserve is None or sequence.preemptions >= MOST_PREEMPTIONS:
            return -(-sequence.longest // size) * size
        return -(-min(sequence.longest, len(sequence.ids) + reserve) // size) * size

    def _trim(self, group: int) -> None:
        """Drop kept prefixes of the group that have to give way to sequences or experts."""
        if self.caches[group].idle:
            self.caches[group].trim(self._most_kept(group))

    def _most_kept(self, group: int) -> int:
        """Number of pages of the group that may be kept for later prompts."""
        room = self.pools[group].pages - self.committed(group)
        return min(room, max(self.limits.prefix_floor, room - self.expert_pages))

    def schedule(self) -> Step | None:
        """Returns the next step; None if nothing is left to do.

        Sequences that decode take one token each, and prompts fill up the step within their limit: the smaller one
        while any sequence decodes, so that a long prompt does not keep it waiting.
        """
        self.preempted = []
        if self.expert_pages != self._left_to_experts:
            self._left_to_experts = self.expert_pages
            for group in range(len(self.caches)):
                self._trim(group)
        if self.waiting:
            self.admit()
        step, prompts = list(self.running), [s for s in self.running if not s.decoding]
        if prompts:
            limit = self.limits.prefill_tokens if len(prompts) == len(step) else self.mixed_tokens
            chunked = set(self.chunk(prompts, limit))
            step = [s for s in step if s.decoding or s in chunked]
        self.grow(step)
        if self.preempted:
            step = [s for s in step if s not in self.preempted]
        if not step:
            return None
        next_step = Step(step, not prompts or all(s.decoding for s in step))
        if self.drafts and next_step.decode and self.drafts.due() and self._few(step):
            self.drafts.propose(step, self._room)
        return next_step

    def _few(self, step: ListOf[Sequence]) -> bool:
        return len(step) <= MOST_DRAFTING or all(len(of) <= MOST_DRAFTING for of in self.by_group(step))

    def room_for_guesses(self, sequence: Sequence, depth: int) -> int:
        """Number of guesses, up to `depth`, that a running sequence may have in its next step; it gets the pages of
        these."""
        room = 0 if sequence.finish_reason else max(0, min(depth, self._room(sequence)))
        for held in sequence.held if room else ():
            if len(sequence.ids) + room > held.end * self.limits.page_size:
                self.caches[sequence.group].extend(held, len(sequence.ids) + room)
        return room

    def grow(self, sequences: ListOf[Sequence]) -> None:
        """Promise running sequences the pages of their next step. Those that have to wait for it are in `preempted`."""
        for sequence in sorted((s for s in sequences if s.end > s.covered), key=_seniority):
            self._make_room(sequence)

    def _room(self, sequence: Sequence) -> int:
        """Number of tokens that a sequence may have in its next step beyond its newest one, without more pages than it
        was promised, or with those of one more page of tokens, if no sequence, kept prefix or expert has to give
        them up."""
        longest = sequence.longest - 1 - len(sequence.ids)
        if self.limits.set_pages and self.limits.prefixes and passes_page(sequence, self.limits.page_size):
            return 0  # so that the step can keep the states at that page's end
        room = sequence.covered - len(sequence.ids)
        if room < min(longest, self.limits.draft_tokens):
            group, more = sequence.group, self.limits.pages_of(sequence.covered + self.limits.page_size)
            taken = self.committed(group) + self.caches[group].kept + self.expert_pages
            if taken + more - sequence.promised <= self.pools[group].pages:
                sequence.promised, sequence.covered = more, sequence.covered + self.limits.page_size
                room += self.limits.page_size
        return min(longest, room)

    def _make_room(self, sequence: Sequence) -> None:
        """Promise a running sequence the pages of its next step, unless it is preempted itself for want of them."""
        group, size = sequence.group, self.limits.page_size
        covered = -(-sequence.end // size) * size
        needed = self.limits.pages_of(covered)
        while sequence not in self.preempted and covered > sequence.covered:
            if self.committed(group) + needed - sequence.promised <= self.pools[group].pages:
                sequence.promised, sequence.covered = needed, covered
                self._trim(group)
            else:
                self._preempt(max((s for s in self.running if s.group == group), key=_seniority))

    def _preempt(self, sequence: Sequence) -> None:
        """Take back the pages of a running sequence, which waits until it is admitted again and recomputes them."""
        self.restart(sequence)
        sequence.preemptions += 1
        if not sequence.generated:
            sequence.prompt_logprobs = []
        self.preempted.append(sequence)

    def restart(self, sequence: Sequence) -> None:
        """Let a running sequence wait again, without its pages."""
        self._release(sequence)
        self.running.remove(sequence)
        sequence.promised, sequence.covered = 0, 0
        sequence.num_computed, sequence.limit = 0, None
        sequence.stored, sequence.read = None, 0
        self._wait(sequence)
        self._trim(sequence.group)

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda s: (s.request.priority, s.arrival))

    def chunk(self, prompts: ListOf[Sequence], limit: int | None) -> list[Sequence]:
        """Chunked prefill: sets how many tokens each of `prompts` takes in the next step, the first ones first, at most
        `limit` tokens of each data-parallel group; None: all tokens. -> the prompts that take some"""
        left: list[int | None] = [limit] * len(self.pools)
        part = []
        for sequence in prompts:
            room = left[sequence.group]
            if room != 0:
                sequence.limit = room
                if sequence.scored:  # each of its rows has logits over the whole vocabulary
                    sequence.limit = min(sequence.new_tokens, MOST_SCORED)
                cut(sequence)
                if room is not None:
                    left[sequence.group] = room - sequence.new_tokens
                part.append(sequence)
        return part

    def reserve(self, sequences: Iterable[Sequence]) -> None:
        """Give each sequence the pages and states that its next step writes to."""
        size = self.limits.page_size
        for sequence in sequences:
            cache = self.caches[sequence.group]
            for held in sequence.held:
                if sequence.end > held.end * size:
                    cache.extend(held, sequence.end)
            if self.limits.set_pages:
                prepare(cache, sequence, self.limits.prefixes, partial(self._most_kept, sequence.group))

    def take_stored(self, sequence: Sequence) -> None:
        """Give a sequence that has computed nothing yet the pages that are read from disk."""
        cache, tokens = self.caches[sequence.group], sequence.stored * self.limits.page_size if sequence.stored else 0
        for held in sequence.held:
            cache.release(held.slide(tokens, self.limits.page_size))
        self._trim(sequence.group)
        for held in sequence.held:
            cache.extend(held, tokens)

    def take_stored_states(self, sequence: Sequence) -> None:
        """Give a sequence the set of states that is read from disk."""
        before, sequence.recurrent.states = sequence.recurrent.states, None
        if before:
            self.caches[sequence.group].release([before])
            self._trim(sequence.group)
        sequence.recurrent.states = self.caches[sequence.group].take_states()

    def restored(self, sequence: Sequence, pages: int) -> None:
        """Record that the first `pages` pages of a sequence were read from disk, as far as they were not there, and its
        states after them."""
        before, size = sequence.num_computed, self.limits.page_size
        sequence.stored, sequence.num_computed = 0, max(pages * size, before)
        sequence.taken = sequence.num_computed
        self._publish(sequence)
        if sequence.recurrent.states and sequence.num_computed > before:
            self.caches[sequence.group].keep(sequence.recurrent.states, sequence.keys[pages - 1])
            sequence.recurrent.at = sequence.num_computed
        cut(sequence)
        if not sequence.preemptions:
            self._count_cached(sequence)
            sequence.restored_tokens = sequence.num_computed - before

    def commit(self, step: Step, tokens: ListOf[int]) -> list[Event]:
        """Record that `step` ran, and that it chose `tokens` for its `finished_prompts`, in their order: one after the
        newest token of each, and one after each drafted one."""
        finished, size, events, at = step.finished_prompts, self.limits.page_size, [], 0
        for sequence in step.sequences:
            sequence.num_computed, sequence.limit = sequence.end, None
        for sequence in finished:
            new: ListOf[int] = tokens[at : at + 1 + sequence.drafted]
            at, drafted = at + len(new), sequence.drafted
            if sequence.drafted and self.drafts:
                new = self.drafts.accept(sequence, new)
            if sequence.matcher:
                new = list(itertools.takewhile(sequence.matcher.accept, new)) or [FAILED]
            new = self._append(sequence, new)
            if sequence.guesses and self.drafts:
                self.drafts.check(sequence, new)
            if new:
                sequence.num_computed = len(sequence.ids) - 1
            reason = sequence.finish_reason
            cached, restored = sequence.cached_tokens, sequence.restored_tokens
            events.append(Event(sequence.id, tuple(new), reason, cached, drafted=drafted, restored_tokens=restored))
        if self.limits.prefixes:
            for sequence in step.sequences:
                if sequence.num_computed >= (sequence.published + 1) * size:
                    self._publish(sequence)
        self.advance(step.sequences)
        self.retire()
        if self.windowed:
            for sequence in step.sequences:
                self.slide(sequence)
        return events

    def advance(self, sequences: Iterable[Sequence]) -> None:
        """Record that a step has written the states of `sequences`."""
        for sequence in sequences if self.limits.set_pages else ():
            cache = self.caches[sequence.group]
            kept = cache.kept
            advance(cache, sequence, self.limits.page_size, self.limits.prefixes)
            if cache.kept > kept:
                self._trim(sequence.group)

    def _append(self, sequence: Sequence, tokens: ListOf[int]) -> ListOf[int]:
        """Appends those of `tokens` to the sequence that come before its end; -> those."""
        if not sequence.ends:  # so there is no grammar either
            new = tokens[: sequence.longest - len(sequence.ids)]
            sequence.ids.extend(new)
            if len(sequence.ids) >= sequence.longest:
                sequence.finish_reason = "length"
            return new
        for count, token in enumerate(tokens):
            if token == FAILED:
                sequence.finish_reason = "error"
                return tokens[:count]
            sequence.ids.append(token)
            if token in sequence.ends:
                sequence.finish_reason = "stop"
            elif len(sequence.ids) >= sequence.longest:
                sequence.finish_reason = "length"
            if sequence.finish_reason:
                return tokens[: count + 1]
        return tokens

    def _publish(self, sequence: Sequence) -> None:
        """Let later prompts find the pages of `sequence` that are full."""
        size = self.limits.page_size
        extend_keys(sequence.keys, sequence.ids[: sequence.num_computed], size, sequence.request.salt)
        for page in range(sequence.published, sequence.num_computed // size):
            for number, held in enumerate(sequence.held):
                if page >= held.first:
                    self.caches[sequence.group].publish(held, page, key_of(sequence.keys[page], number))
        sequence.published = sequence.num_computed // size

    def slide(self, sequence: Sequence) -> None:
        """Give back the pages that none of the sequence's further tokens sees."""
        for held in sequence.held:
            if passed := held.slide(sequence.num_computed, self.limits.page_size):
                self.caches[sequence.group].release(passed)
                self._trim(sequence.group)

    def retire(self) -> list[Sequence]:
        """Remove the sequences that have finished, take back their pages, and return those sequences."""
        finished = [s for s in self.running if s.finish_reason]
        if not finished:
            return finished
        for sequence in finished:
            self._release(sequence)
        self.running = [s for s in self.running if not s.finish_reason]
        for group in {s.group for s in finished}:
            self._trim(group)
        return finished

    def _release(self, sequence: Sequence) -> None:
        """Take back the pages and states of a sequence."""
        cache = self.caches[sequence.group]
        if self.limits.set_pages:
            leave(cache, sequence, self.limits.page_size)
        cache.release(sequence.blocks)
        sequence.held, sequence.recurrent.states, sequence.recurrent.at_page = [], None, None

    def digest(self, step: Step | None = None) -> int:
        """A number of 64 bits that differs, with near certainty, between ranks whose sequences differ, or whose next
        `step` does."""
        facts = array(
            "q", (fact for s in self.running for fact in (s.id, s.group, s.num_computed, len(s.ids), s.ids[-1]))
        )
        facts.extend(fact for s in (step.sequences if step else ()) for fact in (s.id, s.end))
        facts.extend((len(self.waiting), *(count for c in self.caches for count in (c.held, c.kept))))
        return int.from_bytes(hashlib.blake2b(facts.tobytes(), digest_size=8).digest(), "little")


def _seniority(sequence: Sequence) -> tuple[bool, int, int]:
    """A key that orders sequences from the one that is preempted last to the one that is preempted first."""
    return sequence.preemptions < MOST_PREEMPTIONS, sequence.request.priority, sequence.arrival
