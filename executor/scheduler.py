"""Which sequences run. Knows requests and pages, nothing of models or devices.

Every rank runs the same scheduler on the same events, so all agree without a message: data-parallel groups each have
their own pool of pages and an equal share of the batch.
"""

from collections import deque

from errors import UserError
from executor.config import Case
from executor.kv_pages import PagePool, Pages
from executor.sequence import Sequence


class Scheduler:
    def __init__(
        self, batch_size: int, max_sequence_length: int, page_size: int, groups: int, pool: Pages | None = None
    ):
        """`pool`: of the only group, in place of one that has pages for the worst case."""
        self.per_group = batch_size // groups
        self.table_width = -(-max_sequence_length // page_size)  # pages of the longest possible sequence
        self.pages = self.per_group * self.table_width  # of each pool of its own: enough for the worst case
        self.pools: list[Pages] = [pool] if pool else [PagePool(self.pages, page_size) for _ in range(groups)]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # ordered by group

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free places, emptiest group first; they are to be prefilled now.

        Only while the pool has pages for all of a group's sequences at their longest: so each can grow to its end.
        """
        load = [sum(s.group == g for s in self.running) for g in range(len(self.pools))]
        promised = [sum(self._most_pages(s, g) for s in self.running if s.group == g) for g in range(len(self.pools))]
        admitted: list[Sequence] = []
        while self.waiting and min(load) < self.per_group:
            sequence, group = self.waiting[0], load.index(min(load))
            needed, pages = self._most_pages(sequence, group), self.pools[group].pages
            if needed > pages:
                raise UserError(
                    f"KV cache: prompt {sequence.index} may need {needed} pages of {self.pools[group].page_size} "
                    f"tokens, sequences can have {pages}"
                )
            if promised[group] + needed > pages:
                break  # first come, first served: whoever is behind waits as well
            self.waiting.popleft()
            sequence.group = group
            load[group] += 1
            promised[group] += needed
            admitted.append(sequence)
        admitted.sort(key=lambda s: s.group)
        self.running = sorted(self.running + admitted, key=lambda s: s.group)
        return admitted

    def _most_pages(self, sequence: Sequence, group: int) -> int:
        return self.pools[group].pages_for(sequence.longest)

    def reserve(self, sequences: list[Sequence]) -> None:
        """Give each sequence the pages that its next step writes to."""
        for sequence in sequences:
            self.pools[sequence.group].extend(sequence.pages, sequence.end)

    def retire(self) -> list[Sequence]:
        """Drop finished sequences and take back their pages."""
        finished = [s for s in self.running if s.finish_reason]
        for sequence in finished:
            self.pools[sequence.group].release(sequence.pages)
        self.running = [s for s in self.running if not s.finish_reason]
        return finished


def make_scheduler(case: Case, pool: Pages | None = None) -> Scheduler:
    size, groups = case.data_config.batch_size, case.attn_dp_size
    return Scheduler(size, case.max_sequence_length, case.cache_config.page_size, groups, pool)
