"""The KV cache's pages: which are free, and which a sequence holds."""

from errors import UserError


class PagePool:
    """Hands out page numbers 0 .. pages - 1, each to one holder at a time."""

    def __init__(self, pages: int, page_size: int):
        self.pages, self.page_size = pages, page_size
        self.free = list(range(pages - 1, -1, -1))  # taken from the end: low numbers first

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def extend(self, held: list[int], tokens: int) -> None:
        """Grow `held` in place until it has room for `tokens`; all or nothing."""
        missing = self.pages_for(tokens) - len(held)
        if missing > len(self.free):
            raise UserError(f"KV cache: {missing} more pages of {self.page_size} tokens needed, {len(self.free)} free")
        for _ in range(missing):
            held.append(self.free.pop())

    def release(self, held: list[int]) -> None:
        """Take back all pages of `held`, which becomes empty."""
        self.free.extend(reversed(held))
        held.clear()

    def slots(self, held: list[int], start: int, stop: int) -> list[int]:
        """Places in the cache of a sequence's tokens start .. stop - 1."""
        size = self.page_size
        return [held[i // size] * size + i % size for i in range(start, stop)]
