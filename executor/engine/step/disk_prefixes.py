"""Prefixes that survive restarts: pages of the KV cache, and checkpoints of recurrent states, in the files of a
PageStore. Each rank has a folder of its own, with its shard of the pages that its data-parallel group has computed.

What is kept. When a sequence ends, its pages are wanted on disk if there are at least `DEEP` tokens of them; else those
that it had found, which others may look for again. They are copied between steps, few at a time while requests run, and
written by a thread. Those that leave the cache before their turn are not kept.

What is read. In the first step of a prompt, after its pages in memory, as many pages more as all ranks of its group
have on disk are copied into pages that it was promised: a few in each step, so that other requests do not wait for
long, and the prompt takes no tokens meanwhile. Ranks agree on the number, since all schedulers must do the same. A
record that turns out to be wrong is forgotten, and its tokens are computed.

Only rank 0 has a clock: it decides how many records are read in a step, and that none is while computing is faster.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from pathlib import Path

import torch

from umbra.base.errors import UserError
from umbra.base.files import located
from umbra.executor.checkpoint.packed import weight_files
from umbra.executor.config.load import draft_folder, model_folder
from umbra.executor.engine.memory.page_store import LEAST_SEGMENTS, PageStore, Record, WriteBehind
from umbra.executor.engine.memory.prefixes import CHECKPOINT, KEY_BYTES, key_of, usable, whole_pages
from umbra.executor.engine.schedule.scheduler import Scheduler, Step
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.engine import Engine
from umbra.executor.plan.weight_formats import packed_facts

DEEP = 512  # tokens
WAITING_BYTES = 64 << 20  # that are copied and not yet written
WAITING_PROMPTS = 64  # whose pages are not yet copied
SAMPLES, SAMPLE_BYTES = 64, 4096  # of a file of weights
FIRST_RATE = 3e8  # bytes a second that reading is expected to reach before it was measured
OTHERS = 1 << 40  # pages that a rank says to have of a group that is not its own
SLOWER = 1.05  # what the rate is raised by for each prompt that is computed because reading seems slow: to try it again
PageRecord = tuple[int, bytes]  # the number of its page in the prompt, and its name


class DiskPrefixes:
    def __init__(self, engine: Engine, scheduler: Scheduler, local_ranks: int):
        """`local_ranks` are on this machine, and share the limit."""
        settings, world = engine.case.cache_config, engine.parallel.world
        self.engine, self.scheduler, self.memory = engine, scheduler, engine.page_memory
        self.group, self.salted_only = engine.parallel.attn_dp.rank, settings.disk_salted_only
        self.cache, self.size = scheduler.caches[self.group], scheduler.limits.page_size
        self.rate = FIRST_RATE  # bytes a second, lately
        self.most = 1  # records of a prompt that are read in a step, as rank 0 has decided
        self._wanted: deque[tuple[bytes, float, deque[bytes]]] = deque(maxlen=WAITING_PROMPTS)  # salt, time, names
        largest = max(*self.memory.page_bytes, self.memory.state_bytes)
        self._buffer = memoryview(bytearray(largest))
        self.store: PageStore | None = None
        try:
            limit = int(settings.disk_gb * 1e9) // local_ranks
            if limit // LEAST_SEGMENTS < 2 * largest:
                raise UserError(
                    f"cache_config.disk_gb: {settings.disk_gb} is too little for records of {largest} bytes"
                )
            folder = located(settings.disk_path) / f"rank{world.rank}"
            store = PageStore(folder, fingerprint(engine), limit, self._bytes_of)
            self.behind = WriteBehind(store, WAITING_BYTES)
            self.store = store
            print(f"prefixes on disk: in {store.home}, at most {limit / 1e9:g} GB")
        except (UserError, OSError, RuntimeError) as error:  # the last one if the system refuses a thread
            print(f"prefixes on disk: {error}: none are kept or found")

    def _bytes_of(self, name: bytes) -> int | None:
        """The size of the record with this name; None: no record has it."""
        if name.endswith(CHECKPOINT) and len(name) == KEY_BYTES + len(CHECKPOINT):
            return self.memory.state_bytes or None
        number = number_of(name)
        known = number < len(self.memory.page_bytes) and name == key_of(name[:KEY_BYTES].ljust(KEY_BYTES), number)
        return self.memory.page_bytes[number] if known else None

    # What is read.

    def decide(self, prefill_rate: float, pause_s: float) -> int:
        """Rank 0's decision: how many records of a prompt are read in a step, which may take about `pause_s`; 0: none,
        since computing is faster."""
        if not self.store:
            return 0
        page_bytes = sum(self.memory.page_bytes)
        if prefill_rate and page_bytes / self.rate > self.size / prefill_rate:
            return 0
        return max(1, int(pause_s * self.rate * len(self.memory.page_bytes) / page_bytes))

    def restore(self, step: Step | None) -> Step | None:
        """Reads pages of the prompts that begin in `step`. -> the step without those that are not yet read"""
        asked = [s for s in step.sequences if s.stored != 0 and not s.decoding] if step else []
        if not step or not asked:
            return step
        self._look_up([s for s in asked if s.stored is None])
        start, waiting = time.perf_counter(), [s for s in asked if s.stored]
        records = {s.id: self._records(s)[s.read : s.read + max(1, self.most)] for s in waiting}
        for sequence in waiting:
            if records[sequence.id][-1][1].endswith(CHECKPOINT):
                self.scheduler.take_stored_states(sequence)
        done = self._agree([self._read(s, records[s.id]) for s in waiting])
        mine = (name for s in waiting if s.group == self.group for _, name in records[s.id])
        if size := sum(self._bytes_of(name) or 0 for name in mine):
            self.rate = 0.8 * self.rate + 0.2 * size / (time.perf_counter() - start)
        left = set[int]()
        for sequence, count in zip(waiting, done, strict=True):
            missing = count < len(records[sequence.id])
            sequence.read += min(count, len(records[sequence.id]))
            if not missing and sequence.read < len(self._records(sequence)):
                left.add(sequence.id)
            elif not missing or self.plain:
                pages = sequence.published + sequence.read // len(sequence.held)
                self.scheduler.restored(sequence, pages if self.plain else sequence.stored or 0)
            else:
                self.scheduler.restart(sequence)
                left.add(sequence.id)
        sequences = [s for s in step.sequences if s.id not in left]
        return Step(sequences, all(s.decoding for s in sequences)) if sequences else None

    @property
    def plain(self) -> bool:
        """Says whether a prefix can be used up to any of its pages."""
        return not (self.scheduler.windowed or self.scheduler.limits.set_pages)

    def _look_up(self, sequences: ListOf[Sequence]) -> None:
        """Decides how many pages of each sequence are read. All ranks have all that this takes."""
        most = [0 if s.scored or not self.most else (len(s.ids) - 1) // self.size for s in sequences]
        if not self.most:
            self.rate *= SLOWER ** len(sequences)
        while any(most):
            own = [self._kept(s, count) for s, count in zip(sequences, most, strict=True)]
            least = self._agree(own + [-count if count != OTHERS else OTHERS for count in own])
            most, same = least[: len(own)], [-count for count in least[len(own) :]]
            if most == same or self.plain:
                break
        for sequence, count in zip(sequences, most, strict=True):
            sequence.stored = count
            if count:
                self.scheduler.take_stored(sequence)

    def _kept(self, sequence: Sequence, most: int) -> int:
        """Number of pages, up to `most`, that a sequence can begin with if it reads those that this rank has on disk;
        0: reading gives no more than are there."""
        if sequence.group != self.group:
            return OTHERS if most else 0
        store, keys, limits = self.store, sequence.keys, self.scheduler.limits
        if not store or (self.salted_only and not sequence.request.salt):
            return 0
        held = [(held.first, number) for number, held in enumerate(sequence.held)]
        there = {key_of(keys[page], number) for first, number in held for page in range(first, sequence.published)}
        count = whole_pages(keys, sequence.published, most, limits.windows, store.__contains__)
        count = usable(keys, count, limits.windows, self.size, limits.set_pages > 0, lambda n: n in there or n in store)
        return count if count > sequence.published else 0

    def _records(self, sequence: Sequence) -> list[PageRecord]:
        """The records that a sequence reads, in their order, which is the same on all ranks."""
        keys, pages = sequence.keys, sequence.stored or 0
        records = [
            (page, key_of(keys[page], number))
            for page in range(sequence.published, pages)
            for number, held in enumerate(sequence.held)
            if page >= held.first
        ]
        return records + [(pages, keys[pages - 1] + CHECKPOINT)] * bool(self.scheduler.limits.set_pages)

    def _read(self, sequence: Sequence, records: ListOf[PageRecord]) -> int:
        """-> how many of the first `records` were read into the pages and states of a sequence"""
        if sequence.group != self.group:
            return OTHERS
        for count, (page, name) in enumerate(records):
            number = number_of(name)
            held, data = sequence.held[number], self._buffer[: self._bytes_of(name)]
            block = sequence.recurrent.states if name.endswith(CHECKPOINT) else held.blocks[page - held.first]
            if not (block and self.store and self.store.read(name, data)):
                return count
            self.memory.load(block, number, data)
        return len(records)

    def _agree(self, counts: list[int]) -> list[int]:
        """The smallest of all ranks' counts."""
        world = self.engine.parallel.world
        if world.size == 1 or not counts:
            return counts
        mine = torch.tensor([counts], device=self.engine.platform.device)
        least: list[int] = world.gather_rows(mine, None).amin(0).tolist()
        return least

    # What is kept.

    @property
    def pending(self) -> bool:
        """Says whether pages wait to be copied."""
        return bool(self._wanted) and self.store is not None and not self.behind.broken

    def ended(self, sequences: ListOf[Sequence]) -> None:
        """To be called with the sequences that have ended in a step."""
        for s in sequences:
            if not self.store or s.group != self.group or (self.salted_only and not s.request.salt):
                continue
            pages = s.published if s.published * self.size >= DEEP else min(s.cached_tokens // self.size, s.published)
            names, now = deque(self._names(s.keys[:pages])), time.time()
            self.store.use(names, now)
            if names:
                self._wanted.append((s.request.salt, now, names))

    def _names(self, keys: ListOf[bytes]) -> Iterator[bytes]:
        """Yields the names of the pages and checkpoints behind `keys`, in their order, whether they exist or not."""
        for key in keys:
            yield from (key_of(key, number) for number in range(len(self.memory.page_bytes)))
            if self.memory.state_bytes:
                yield key + CHECKPOINT

    def copy(self, most: int) -> None:
        """Copies wanted pages for the thread that writes them: of `most` bytes, or one."""
        while self.pending and most > 0 and self.behind.room > 0:
            salt, used, names = self._wanted[0]
            name = names.popleft()
            if not names:
                self._wanted.popleft()
            block = self.cache.index.get(name)
            if block and self.store and name not in self.store and name not in self.behind:
                self.behind.add(Record(name, salt, data := self.memory.save(block, number_of(name)), used))
                most -= len(data)

    def finish(self, seconds: float) -> None:
        """Writes all that is wanted, in about so many seconds at most."""
        until = time.monotonic() + seconds
        while self.pending and time.monotonic() < until:
            self.copy(WAITING_BYTES)
            self.behind.flush(until - time.monotonic())
        if self.store:
            self.behind.flush(until - time.monotonic())


def number_of(name: bytes) -> int:
    """The number of the layer set whose page has this name; 0 for states."""
    return 0 if name.endswith(CHECKPOINT) else int.from_bytes(name[KEY_BYTES:], "little")


def fingerprint(engine: Engine) -> bytes:
    """Everything that decides the bytes of a page, but its tokens."""
    case, world = engine.case, engine.parallel.world
    folders = [model_folder(case)] if case.model_config.with_ckpt else []
    folders += [draft_folder(case)] if case.draft_config.method == "eagle3" else []
    facts = [
        repr(engine.config),
        packed_facts(case),
        dataclasses.asdict(case.draft_config),
        engine.kernels,
        case.platform,
        case.cache_config.page_size,
        engine.page_memory.layout,
        (world.rank, world.size),
        [list(weights(folder)) for folder in folders],
    ]
    return json.dumps(facts).encode()


def weights(folder: Path) -> Iterator[tuple[str, int, int, int, str]]:
    """Yields the facts that tell a model's weights from all others. The time of a file's last change of any kind, which
    programs cannot set, differs between any two files that were not written at once; samples, evenly over the file,
    differ then."""
    for path in weight_files(folder):
        status, digest = path.stat(), hashlib.blake2b(digest_size=16)
        with open(path, "rb", buffering=0) as file:
            for part in range(SAMPLES):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, status.st_size * part // SAMPLES))
        yield path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, digest.hexdigest()
