"""Which sequences run. Knows requests and pages, nothing of models or devices.

Every rank runs the same scheduler on the same events, so all agree without a message: data-parallel groups each have
their own pool of pages and an equal share of the batch.
"""

from collections import deque

from executor.config import Case
from executor.kv_pages import PagePool
from executor.sequence import Sequence


class Scheduler:
    def __init__(self, batch_size: int, max_sequence_length: int, page_size: int, groups: int):
        self.per_group = batch_size // groups
        self.table_width = -(-max_sequence_length // page_size)  # pages of the longest possible sequence
        self.pages = self.per_group * self.table_width  # of each pool: enough for the worst case
        self.pools = [PagePool(self.pages, page_size) for _ in range(groups)]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # ordered by group

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free places, emptiest group first; they are to be prefilled now."""
        load = [sum(s.group == g for s in self.running) for g in range(len(self.pools))]
        admitted: list[Sequence] = []
        while self.waiting and min(load) < self.per_group:
            sequence = self.waiting.popleft()
            sequence.group = load.index(min(load))
            load[sequence.group] += 1
            admitted.append(sequence)
        admitted.sort(key=lambda s: s.group)
        self.running = sorted(self.running + admitted, key=lambda s: s.group)
        return admitted

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


def make_scheduler(case: Case) -> Scheduler:
    size, groups = case.data_config.batch_size, case.attn_dp_size
    return Scheduler(size, case.max_sequence_length, case.cache_config.page_size, groups)
