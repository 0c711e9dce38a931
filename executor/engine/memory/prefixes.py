"""Keeps full pages of the KV cache after their sequences have ended, so that later prompts that begin alike need not
compute them again.

A page is found by a key: a hash of its tokens and of the key of the page before it, so that it stands for everything up
to its end. The first page's key also depends on the request's salt: requests with different salts never find each
other's pages, or learn from the time that a prompt takes whether they are there.

Each set of layers (layer_sets.py) has pages and keys of its own. A prefix is found if layers that see all tokens have
all of its pages, and those that see a window have the pages of the window before its end. A model with recurrent states
also needs those after the prefix: a checkpoint (schedule/states.py) with the key of the last page.

Only full pages are shared, and the last token of a prompt is always computed, so no sequence ever writes into a page
that another one can read.

What one more page would be worth, and one less, is counted as well: how often prompts found one of the pages that would
be dropped next, and how often they looked for one that was dropped lately.
"""

import hashlib
import itertools
from array import array
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import NamedTuple

from umbra.executor.engine.memory.pages import Block, Holding, Pages, States

MARGIN = 16  # the worth of kept pages is measured on one of this many of all pages
KEY_BYTES = 32  # nobody can make two texts with equal keys, so tokens need not be compared
CHECKPOINT = b"states"  # behind the key of a page: the states after it


def extend_keys(keys: list[bytes], ids: "array[int]", page_size: int, salt: bytes) -> None:
    """Grow `keys` in place to the keys of all full pages of `ids`."""
    first, end = len(keys), len(ids) // page_size
    if first >= end:
        return
    tokens, nbytes = memoryview(ids).cast("B"), page_size * ids.itemsize
    before = keys[-1] if keys else hashlib.blake2b(salt, digest_size=KEY_BYTES).digest()
    for page in range(first, end):
        page_tokens = tokens[page * nbytes : (page + 1) * nbytes]
        before = hashlib.blake2b(before + page_tokens, digest_size=KEY_BYTES).digest()
        keys.append(before)


def key_of(key: bytes, number: int) -> bytes:
    """The key of the page of layer set `number`, whose tokens have the key `key`."""
    return key + number.to_bytes(2, "little") if number else key


class CachedPrefix(NamedTuple):
    """The part of a prompt's beginning that is kept."""

    held: list[Holding]  # of each set of layers
    states: States | None  # after them, of a model that has some
    pages: int  # number of pages that were found, with or without states after them

    @property
    def blocks(self) -> list[Block]:
        blocks = [block for held in self.held for block in held.blocks]
        return [*blocks, self.states] if self.states else blocks


def whole_pages(
    keys: ListOf[bytes], first: int, most: int, windows: ListOf[int | None], kept: Callable[[bytes], bool]
) -> int:
    """The pages of a prompt, up to `most`, of which the layers that see all tokens have every one, as they have of the
    `first` ones."""
    whole = [number for number, window in enumerate(windows) if window is None]
    count, most = first, min(most, len(keys))
    while count < most and all(kept(key_of(keys[count], number)) for number in whole):
        count += 1
    return count


def usable(
    keys: ListOf[bytes], count: int, windows: ListOf[int | None], size: int, states: bool, kept: Callable[[bytes], bool]
) -> int:
    """The most pages, up to `count`, that a prompt can begin with, of which the layers that see all tokens have every
    one: those that see a window need the pages of the window before their end, and a model with `states` those after
    them. `kept` says what there is."""
    missing: int | None = 0
    while missing is not None:  # the last page that is missing in a window before the end
        while states and count and not kept(keys[count - 1] + CHECKPOINT):
            count -= 1
        missing = max(
            (
                page
                for number, window in enumerate(windows)
                if window is not None
                for page in range(max(0, count * size - window + 1) // size, count)
                if not kept(key_of(keys[page], number))
            ),
            default=None,
        )
        count = count if missing is None else missing
    return count


class PageCache:
    """The pages of one data-parallel group: those that sequences hold, and those that are kept for later prompts.

    A page's predecessor is held or kept wherever the page is: sequences hold all pages up to their end, and give back
    the last ones first, so that `trim`, which drops what was given back longest ago, drops a page before its
    predecessor.
    """

    def __init__(self, pool: Pages):
        self.pool = pool
        self.held = self.kept = 0  # number of pages that sequences hold, and of those that are kept
        self.sets = 0  # number of sets of states, held or kept
        # Number of holders, beyond the first, of passing pages: what they share now, they do not share for long.
        self.shared_in_passing = 0
        self.index: dict[bytes, Block] = {}  # full pages and checkpoints by key
        self.idle: dict[bytes, Block] = {}  # those of `index` that no sequence holds, in the order of their last use
        self.margin, self.most_dropped = max(1, pool.pages // MARGIN), max(1, pool.pages // 2)
        self.dropped: dict[bytes, None] = {}  # keys of the last `most_dropped` pages that were dropped
        self.last_hits = 0  # number of pages found that were among the `margin` next ones to be dropped
        self.missed_hits = 0  # number of pages looked for that were among `dropped`

    @property
    def live_states(self) -> int:
        """Number of sets of states that sequences hold."""
        return self.sets - self.kept_states

    @property
    def kept_states(self) -> int:
        """Number of checkpoints that no sequence holds."""
        return sum(key.endswith(CHECKPOINT) for key in self.idle) if self.sets else 0

    def find(self, keys: ListOf[bytes], tokens: int, windows: ListOf[int | None] = (None,)) -> CachedPrefix:
        """Returns what is kept of the beginning of `tokens` tokens, whose full pages have the keys `keys`, for sets of
        layers that see `windows`. The last token is never part of it."""
        size, kept = self.pool.page_size, self.index.__contains__
        pages = whole_pages(keys, 0, (tokens - 1) // size, windows, kept)
        count = usable(keys, pages, windows, size, self.pool.set_pages > 0, kept)
        states = self.index.get(keys[count - 1] + CHECKPOINT) if count else None
        holdings = [Holding(window) for window in windows]
        for number, held in enumerate(holdings):
            held.slide(count * size, size)
            held.blocks = [self.index[key_of(key, number)] for key in keys[held.first : count]]
        return CachedPrefix(holdings, states if count and isinstance(states, States) else None, pages)

    def hold(self, blocks: ListOf[Block]) -> None:
        """Count one more sequence as holder of `blocks`, which `find` found."""
        if any(not block.holders for block in blocks):
            last = self._next_to_go()
            if any(block.key in last for block in blocks if isinstance(block, States)):  # the pages need the states
                self.last_hits += sum(not isinstance(block, States) for block in blocks)
            else:
                self.last_hits += sum(block.key in last for block in blocks)
        for block in blocks:
            if not block.holders:
                del self.idle[block.key]
                self.held += block.pages
                self.kept -= block.pages
            else:
                self.shared_in_passing += block.passing * block.pages
            block.holders += 1

    def _next_to_go(self) -> set[bytes]:
        """The keys of the `margin` pages that would be dropped next, and of checkpoints among them."""
        last, pages = set(), 0
        for key, block in self.idle.items():
            if pages >= self.margin:
                break
            last.add(key)
            pages += block.pages
        return last

    def count_missed(self, keys: ListOf[bytes]) -> None:
        """Count which pages of a prompt, whose keys are those after the pages found, were dropped lately."""
        self.missed_hits += sum(1 for _ in itertools.takewhile(self.dropped.__contains__, keys))

    def extend(self, held: Holding, tokens: int) -> None:
        """Grow `held` in place until it has room for `tokens` tokens."""
        self.held += self.pool.extend(held, tokens)

    def publish(self, held: Holding, page: int, key: bytes) -> None:
        """Let later prompts find the full page `page` of a sequence under `key`. If another sequence has published such
        a page already, this one is given back, and that one is held in its place."""
        block = held.blocks[page - held.first]
        if not block.key:
            other = self.index.setdefault(key, block)
            if other is block:
                block.key = key
                self.dropped.pop(key, None)
            else:
                self.hold([other])
                self.release([block])
                held.blocks[page - held.first] = other
                self.pool.version += 1

    def take_states(self) -> States:
        """A set of states for a sequence."""
        states = self.pool.take_states()
        self.held += states.pages
        self.sets += 1
        return states

    def keep(self, states: States, key: bytes) -> None:
        """Let later prompts find `states` after the page with `key`, unless others are there."""
        if not states.key and self.index.setdefault(key + CHECKPOINT, states) is states:
            states.key = key + CHECKPOINT

    def touch(self, states: States) -> None:
        """Drop the checkpoint `states` as late as if it had been given back now, if it is still kept."""
        if self.idle.get(states.key) is states:
            self.idle[states.key] = self.idle.pop(states.key)

    def release(self, blocks: ListOf[Block]) -> None:
        """Count one holder less of each of `blocks`. Pages and states without holders are kept if they can be found."""
        unknown = []
        for block in reversed(blocks):
            block.holders -= 1
            if block.holders:
                self.shared_in_passing -= block.passing * block.pages
            else:
                self.held -= block.pages
                if block.key:
                    self.idle[block.key] = block
                    self.kept += block.pages
                else:
                    unknown.append(block)
        self._give(unknown[::-1])

    def trim(self, most: int) -> None:
        """Drop what was used longest ago until at most `most` pages are kept without a holder."""
        while self.kept > max(most, 0):
            key = next(iter(self.idle))
            self._drop(key)
            if (states := key + CHECKPOINT) in self.idle:
                self._drop(states)
            if not key.endswith(CHECKPOINT):
                self.dropped[key] = None
                if len(self.dropped) > self.most_dropped:
                    del self.dropped[next(iter(self.dropped))]

    def _drop(self, key: bytes) -> None:
        block = self.idle.pop(key)
        del self.index[key]
        self.kept -= block.pages
        self._give([block])

    def _give(self, blocks: ListOf[Block]) -> None:
        self.sets -= sum(isinstance(block, States) for block in blocks)
        self.pool.give(blocks)
