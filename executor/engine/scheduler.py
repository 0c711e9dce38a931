"""Which sequences run. Knows requests and pages, nothing of models or devices.

Every rank runs the same scheduler on the same events, so all agree without a message: data-parallel groups each have
their own pool of pages and an equal share of the batch.

Shadow experts do not change that, although their copies end at other times on each rank, and so other experts are
resident and other pages free there. Who is admitted depends on how many pages a pool may hand out at most and on how
long sequences may become, and not on who is resident; pages that were promised can be had, since experts leave for them
(ElasticPages). `pages` is the same on all ranks: all have as many experts of the same bytes, and an arena of one size.
Which numbers pages have is each rank's own affair: a rank packs the block tables of its own group only, for its own
cache. Of the other groups it counts pages, with PagePools that no cache belongs to.
"""

from collections import deque

from errors import UserError
from executor.config.case import Case
from executor.engine.pages import PagePool, Pages
from executor.engine.request import Sequence


class Scheduler:
    def __init__(
        self,
        batch_size: int,
        max_sequence_length: int,
        page_size: int,
        groups: int,
        pool: Pages | None = None,
        group: int = 0,
    ):
        """`pool`: of this rank's `group`, with fewer pages, as all groups then have, than the worst case takes."""
        self.per_group = batch_size // groups
        self.table_width = -(-max_sequence_length // page_size)  # pages of the longest possible sequence
        self.pages = self.per_group * self.table_width  # of a group: enough for the worst case
        pages = pool.pages if pool else self.pages
        self.pools: list[Pages] = [PagePool(pages, page_size) for _ in range(groups)]
        if pool:
            self.pools[group] = pool
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


def make_scheduler(case: Case, pool: Pages | None = None, group: int = 0) -> Scheduler:
    size, groups = case.data_config.batch_size, case.attn_dp_size
    return Scheduler(size, case.max_sequence_length, case.cache_config.page_size, groups, pool, group)
