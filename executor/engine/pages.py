"""The KV cache's pages: which are free, and which a sequence holds."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from cpu_offload.memory.arena import Arena
from errors import UserError


class Pages(ABC):
    """Hands out page numbers, whatever they are, each to one holder at a time."""

    pages: int  # that sequences may hold together
    padding: int  # the number of one page more, which is nobody's
    page_size: int

    @abstractmethod
    def available(self, wanted: int) -> int:
        """How many can be taken, where `wanted` are needed."""

    @abstractmethod
    def take(self) -> int: ...

    @abstractmethod
    def give(self, pages: list[int]) -> None: ...

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def extend(self, held: list[int], tokens: int) -> None:
        """Grow `held` in place until it has room for `tokens`; all or nothing."""
        missing = self.pages_for(tokens) - len(held)
        available = self.available(missing)
        if missing > available:
            raise UserError(f"KV cache: {missing} more pages of {self.page_size} tokens needed, {available} free")
        for _ in range(missing):
            held.append(self.take())

    def release(self, held: list[int]) -> None:
        """Take back all pages of `held`, which becomes empty."""
        self.give(held)
        held.clear()

    def slots(self, held: list[int], start: int, stop: int) -> list[int]:
        """Places in the cache of a sequence's tokens start .. stop - 1."""
        size = self.page_size
        return [held[i // size] * size + i % size for i in range(start, stop)]


class PagePool(Pages):
    """Numbers 0 .. pages - 1."""

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
    """Frames of the arena, by their first units. Where too few are free, `make_room(frames)` has experts leave."""

    def __init__(
        self,
        arena: Arena,
        page_size: int,
        pinned: int,
        make_room: Callable[[int], None],
        copy: Callable[[int, int], object],
    ):
        """`pinned`: frames of experts that may not leave. `copy(from, to)` copies a page."""
        self.arena, self.make_room, self.copy = arena, make_room, copy
        self.holders: dict[int, list[int]] = {}  # page -> the list of its holder
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
        """Makes an extent of the arena free, if that can be had by moving pages. Between two steps: what they hold is
        copied, and their holders' lists, of which each step's block tables are made, are written anew."""
        for old, new in self.arena.gather(self.padding):
            self.copy(old, new)
            held = self.holders[new] = self.holders.pop(old)
            held[held.index(old)] = new
