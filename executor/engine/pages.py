"""The pages of the KV cache: which pages are free, and which pages each sequence holds."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from cpu_offload.memory.arena import Arena
from errors import UserError


class Pages(ABC):
    """Hands out page numbers. Each page has at most one holder at a time."""

    pages: int  # most pages that all sequences together may hold
    padding: int  # number of one more page, which no sequence holds: padding rows are written to it
    page_size: int

    @abstractmethod
    def available(self, wanted: int) -> int:
        """Returns how many pages can be taken, after trying to make `wanted` pages free."""

    @abstractmethod
    def take(self) -> int: ...

    @abstractmethod
    def give(self, pages: list[int]) -> None: ...

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def extend(self, held: list[int], tokens: int) -> None:
        """Grow `held`, a sequence's pages, in place until they have room for `tokens` tokens. If pages are missing,
        none is taken and an error is raised."""
        missing = self.pages_for(tokens) - len(held)
        available = self.available(missing)
        if missing > available:
            raise UserError(f"KV cache: {missing} more pages of {self.page_size} tokens needed, {available} free")
        for _ in range(missing):
            held.append(self.take())

    def release(self, held: list[int]) -> None:
        """Take back all pages in `held` and empty it."""
        self.give(held)
        held.clear()

    def slots(self, held: list[int], start: int, stop: int) -> list[int]:
        """The page places (positions in the KV cache) of tokens start .. stop - 1 of the sequence that holds `held`."""
        size = self.page_size
        return [held[i // size] * size + i % size for i in range(start, stop)]


class PagePool(Pages):
    """A fixed pool: its pages have the numbers 0 .. pages - 1."""

    def __init__(self, pages: int, page_size: int):
        self.pages, self.padding, self.page_size = pages, pages, page_size
        self.free = list(range(pages - 1, -1, -1))  # taken from the end: low numbers first

    def available(self, wanted: int) -> int:
        return len(self.free)

    def take(self) -> int:
        return self.free.pop()

    def give(self, pages: list[int]) -> None:
        self.free.extend(reversed(pages))


class ElasticPages(Pages):
    """Pages are frames of the arena; a page's number is the number of its frame's first unit. If too few frames are
    free, `make_room(frames)` evicts experts."""

    def __init__(
        self,
        arena: Arena,
        page_size: int,
        pinned: int,
        make_room: Callable[[int], None],
        copy: Callable[[int, int], object],
    ):
        """`pinned` is the number of frames of experts that may not be evicted. `copy(from, to)` copies a page."""
        self.arena, self.make_room, self.copy = arena, make_room, copy
        self.holders: dict[int, list[int]] = {}  # page -> the list of pages of the sequence that holds it
        self.pages, self.padding, self.page_size = arena.frames - pinned - 1, self.take(), page_size

    def available(self, wanted: int) -> int:
        if wanted > self.arena.free_frames:
            self.make_room(wanted - self.arena.free_frames)
        return self.arena.free_frames

    def take(self) -> int:
        page = self.arena.take_page()
        if page is None:
            raise UserError("KV cache: the arena has no page left")
        return page

    def extend(self, held: list[int], tokens: int) -> None:
        before = len(held)
        super().extend(held, tokens)
        self.holders |= dict.fromkeys(held[before:], held)

    def give(self, pages: list[int]) -> None:
        for page in pages:
            self.arena.give_page(page)
            del self.holders[page]

    def gather(self) -> None:
        """Frees an extent of the arena by moving pages, if that is possible. To be called between two steps: it copies
        the contents of the moved pages and updates the lists of pages of their sequences, from which the block tables
        of each step are made."""
        for old, new in self.arena.gather(self.padding):
            self.copy(old, new)
            held = self.holders[new] = self.holders.pop(old)
            held[held.index(old)] = new
