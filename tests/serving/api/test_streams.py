"""The answers of several sources together."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any

import pytest

from serving.api.errors import ApiError
from serving.api.streams import UNREAD, together


def run(work: Awaitable[Any]) -> Any:
    """What `work` gives; it must leave no task behind, and end in a moment."""

    async def alone() -> Any:
        found = await asyncio.wait_for(work, 5)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        return found

    return asyncio.run(alone())


class Source:
    """Yields numbers, each when its turn has come; then it ends or fails."""

    def __init__(self, *items: int, error: Exception | None = None):
        self.items, self.error, self.closed = items, error, False

    async def read(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                yield item
            if self.error:
                raise self.error
        finally:
            self.closed = True


async def all_of(sources: list[Source]) -> list[int]:
    return [item async for item in together([source.read() for source in sources])]


def test_items_of_all_sources_come_until_all_have_ended() -> None:
    sources = [Source(1, 2, 3), Source(), Source(*range(10, 14 + UNREAD))]

    found = run(all_of(sources))
    assert sorted(found) == [1, 2, 3, *range(10, 14 + UNREAD)]
    assert [item for item in found if item < 10] == [1, 2, 3]
    assert all(source.closed for source in sources)
    alone = Source(1).read()
    assert together([alone]) is alone


def test_the_error_of_one_source_ends_all() -> None:
    sources = [Source(*range(1000)), Source(error=ApiError(500, "it broke"))]

    with pytest.raises(ApiError, match="it broke"):
        run(all_of(sources))
    assert all(source.closed for source in sources)


def test_sources_end_with_their_reader() -> None:
    sources = [Source(*range(1000)), Source(*range(1000))]

    async def first() -> int:
        async with aclosing(together([source.read() for source in sources])) as items:
            found = await anext(items)
        assert all(source.closed for source in sources)
        return found

    assert run(first()) == 0
    assert all(source.closed for source in sources)
