"""The pages of the KV cache: which are free, and which are given out as blocks."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

from umbra.base.errors import UserError
from umbra.cpu_offload.memory.arena import Arena


@dataclass(eq=False, slots=True)
class Block:
    """A page that was taken, and what it holds. Several sequences may share one; when a page moves, only `page`
    changes."""

    page: int  # its number in block tables
    holders: int = 1  # number of sequences that hold it
    key: bytes = b""  # of a full page that later prompts can find (executor/engine/memory/prefixes.py)
    passing: bool = False  # whether sequences give it back while they run, as their windows or states move on
    pages: int = 1  # number of pages that it takes


@dataclass(eq=False, slots=True)
class States(Block):
    """A set of recurrent states, one of each layer that has states, after some token of a sequence. Under a key it is a
    checkpoint, which nobody writes any more."""

    places: tuple[int, ...] = ()  # where the layers have them


@dataclass(eq=False, slots=True)
class Holding:
    """The pages that a sequence holds for a set of layers: those of its tokens from page `first` on."""

    window: int | None  # tokens, up to itself, that a token sees; None: all
    blocks: list[Block] = field(default_factory=list)
    first: int = 0
    table: "array[int]" = field(default_factory=lambda: array("q"))  # numbers of pages, as far as packed before
    version: int = 0  # `Pages.version` when `table` was made

    @property
    def end(self) -> int:
        """Number of pages up to the last one."""
        return self.first + len(self.blocks)

    def slide(self, tokens: int, page_size: int) -> list[Block]:
        """Removes the pages that no token after `tokens` tokens sees, and returns them."""
        if self.window is None or (first := max(0, tokens - self.window + 1) // page_size) <= self.first:
            return []
        passed = self.blocks[: first - self.first]
        del self.blocks[: len(passed)]
        self.first = first
        del self.table[:]
        return passed

    def pages(self, pool: "Pages") -> "array[int]":
        """The block table: the numbers of the pages from the first token on. Pages before `first`, which nobody reads,
        are the first one."""
        table = self.table
        if self.version != pool.version:
            self.version = pool.version
            del table[:]
        if not table and self.first:
            table.extend([self.blocks[0].page] * self.first)
        if len(table) < self.end:
            table.extend([block.page for block in self.blocks[len(table) - self.first :]])
        return table


class Pages(ABC):
    """Hands out pages."""

    version: int = 0  # raised when a sequence may find another page at the place of one that it holds
    pages: int  # most pages that all sequences together may hold
    padding: int  # number of one more page, which no sequence holds: padding rows are written to it
    page_size: int
    stride: int = 1  # of the numbers of pages
    set_pages: int = 0  # pages that a set of recurrent states takes; 0: the model has none

    @abstractmethod
    def available(self, wanted: int) -> int:
        """Returns how many pages can be taken, after trying to make `wanted` pages free."""

    @abstractmethod
    def take(self) -> Block: ...

    @abstractmethod
    def take_states(self) -> States:
        """Takes a set of states, between two steps; as many pages as it takes must be available."""

    @abstractmethod
    def give(self, blocks: ListOf[Block]) -> None: ...

    def extend(self, held: Holding, tokens: int) -> int:
        """Grow `held` in place until it has room for `tokens` tokens. Returns the number of pages taken. If pages are
        missing, none is taken and an error is raised."""
        missing = -(-tokens // self.page_size) - held.end
        available = self.available(missing)
        if missing > available:
            raise UserError(f"KV cache: {missing} more pages of {self.page_size} tokens needed, {available} free")
        for _ in range(missing):
            held.blocks.append(block := self.take())
            block.passing = held.window is not None
        return max(missing, 0)


class PagePool(Pages):
    """A fixed pool: its pages have the numbers 0 .. pages - 1."""

    def __init__(self, pages: int, page_size: int, set_pages: int = 0):
        self.pages, self.padding, self.page_size, self.set_pages = pages, pages, page_size, set_pages
        self.free = list(range(pages - 1, -1, -1))  # taken from the end: low numbers first

    def available(self, wanted: int) -> int:
        return len(self.free)

    def take(self) -> Block:
        return Block(self.free.pop())

    def take_states(self) -> States:
        taken = tuple(self.free.pop() for _ in range(self.set_pages))
        return States(taken[0], passing=True, pages=self.set_pages, places=taken)

    def give(self, blocks: ListOf[Block]) -> None:
        for block in reversed(blocks):
            self.free.extend(block.places if isinstance(block, States) else (block.page,))


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
        self.blocks: dict[int, Block] = {}  # by page
        self.pages, self.padding, self.page_size = arena.frames - pinned - 1, self.take().page, page_size
        self.stride, self.set_pages = arena.units, arena.set_frames

    def available(self, wanted: int) -> int:
        if wanted > self.arena.free_frames:
            self.make_room(wanted - self.arena.free_frames)
        return self.arena.free_frames

    def take(self) -> Block:
        page = self.arena.take_page()
        if page is None:
            raise UserError("KV cache: the arena has no page left")
        block = self.blocks[page] = Block(page)
        return block

    def take_states(self) -> States:
        if self.available(self.set_pages) < self.set_pages:
            raise UserError("KV cache: the arena has no room left for recurrent states")
        while self.arena.lacks_extent:
            self.gather()
        places = self.arena.take_states()
        return States(places[0], passing=True, pages=self.set_pages, places=places)

    def give(self, blocks: ListOf[Block]) -> None:
        for block in blocks:
            if isinstance(block, States):
                self.arena.give_states(block.places)
            else:
                self.arena.give_page(block.page)
                del self.blocks[block.page]

    def gather(self) -> None:
        """Frees an extent of the arena by moving pages, if that is possible. To be called between two steps: it copies
        the contents of the moved pages and updates their blocks, from which the block tables of each step are made."""
        for old, new in self.arena.gather(self.padding):
            self.version += 1
            self.copy(old, new)
            block = self.blocks[new] = self.blocks.pop(old)
            block.page = new
