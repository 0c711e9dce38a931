"""Keeps full pages of the KV cache after their sequences have ended, so that later prompts that begin alike need not
compute them again.

A page is found by a key: a hash of its tokens and of the key of the page before it, so that it stands for everything up
to its end. The first page's key also depends on the request's salt: requests with different salts never find each
other's pages, or learn from the time that a prompt takes whether they are there.

Each set of layers (layer_sets.py) has pages and keys of its own. A prefix is found if layers that see all tokens have
all of its pages, and those that see a window have the pages of the window before its end.

Only full pages are shared, and the last token of a prompt is always computed, so no sequence ever writes into a page
that another one can read.

What one more page would be worth, and one less, is counted as well: how often prompts found one of the pages that would
be dropped next, and how often they looked for one that was dropped lately.
"""

import hashlib
import itertools
from array import array
from collections.abc import Sequence as ListOf

from executor.engine.pages import Block, Holding, Pages

MARGIN = 16  # the worth of kept pages is measured on one of this many of all pages
KEY_BYTES = 32  # nobody can make two texts with equal keys, so tokens need not be compared


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


class PageCache:
    """The pages of one data-parallel group: those that sequences hold, and those that are kept for later prompts.

    A page's predecessor is held or kept wherever the page is: sequences hold all pages up to their end, and give back
    the last ones first, so that `trim`, which drops what was given back longest ago, drops a page before its
    predecessor.
    """

    def __init__(self, pool: Pages):
        self.pool = pool
        self.held = 0  # number of pages that sequences hold
        # Number of holders, beyond the first, of passing pages: what they share now, they do not share for long.
        self.shared_in_passing = 0
        self.index: dict[bytes, Block] = {}  # full pages by key
        self.idle: dict[bytes, Block] = {}  # those of `index` that no sequence holds, in the order of their last use
        self.margin, self.most_dropped = max(1, pool.pages // MARGIN), max(1, pool.pages // 2)
        self.dropped: dict[bytes, None] = {}  # keys of the last `most_dropped` pages that were dropped
        self.last_hits = 0  # number of pages found that were among the `margin` next ones to be dropped
        self.missed_hits = 0  # number of pages looked for that were among `dropped`

    def find(self, keys: ListOf[bytes], tokens: int, windows: ListOf[int | None] = (None,)) -> list[Holding]:
        """The pages that hold the beginning of `tokens` tokens, whose full pages have the keys `keys`, for sets of
        layers that see `windows`. The last token is never among them."""
        size, count = self.pool.page_size, 0
        whole = [number for number, window in enumerate(windows) if window is None]
        keys = keys[: (tokens - 1) // size]
        while count < len(keys) and all(key_of(keys[count], number) in self.index for number in whole):
            count += 1
        missing: int | None = 0
        while missing is not None:  # the last page that is missing in a window before the end
            missing = max(
                (
                    page
                    for number, window in enumerate(windows)
                    if window is not None
                    for page in range(max(0, count * size - window + 1) // size, count)
                    if key_of(keys[page], number) not in self.index
                ),
                default=None,
            )
            count = count if missing is None else missing
        found = [Holding(window) for window in windows]
        for number, held in enumerate(found):
            held.slide(count * size, size)
            held.blocks = [self.index[key_of(key, number)] for key in keys[held.first : count]]
        return found

    def hold(self, blocks: list[Block]) -> None:
        """Count one more sequence as holder of `blocks`, which `find` found."""
        if any(not block.holders for block in blocks):
            last = set(itertools.islice(self.idle, self.margin))
            self.last_hits += sum(block.key in last for block in blocks)
        for block in blocks:
            if not block.holders:
                del self.idle[block.key]
                self.held += 1
            else:
                self.shared_in_passing += block.passing
            block.holders += 1

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

    def release(self, blocks: list[Block]) -> None:
        """Count one holder less of each of `blocks`. Pages without holders are kept if they are published."""
        unknown = []
        for block in reversed(blocks):
            block.holders -= 1
            if block.holders:
                self.shared_in_passing -= block.passing
            else:
                self.held -= 1
                if block.key:
                    self.idle[block.key] = block
                else:
                    unknown.append(block)
        self.pool.give(unknown[::-1])

    def trim(self, most: int) -> None:
        """Drop the pages that were used longest ago until at most `most` are kept without a holder."""
        while len(self.idle) > max(most, 0):
            key = next(iter(self.idle))
            block = self.idle.pop(key)
            del self.index[key]
            self.pool.give([block])
            self.dropped[key] = None
            if len(self.dropped) > self.most_dropped:
                del self.dropped[next(iter(self.dropped))]
