"""Compiles the grammars of requests beside the steps of a rank, so that no step waits for one.

Rank 0 shares a request's grammar when it comes, and the request when it has compiled the grammar itself. The other
ranks compile at the same time, and wait for themselves if they take longer.
"""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from umbra.executor.engine.schedule.request import Grammar

if TYPE_CHECKING:
    from umbra.executor.engine.schedule.grammar import Grammars, Matcher


class Matchers:
    """Matchers for the checkpoint in `folder`, whose end-of-sequence ids are `ends`, by the ids of their requests. Its
    one thread reads the tokenizer first: start it while weights are read, since that holds up others."""

    def __init__(self, folder: Path, vocabulary: int, ends: Collection[int]):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._grammars = self._thread.submit(read_grammars, folder, vocabulary, ends)
        self._matchers: dict[int, Future[Matcher]] = {}

    def wait(self) -> None:
        """Returns when the tokenizer has been read, or cannot be: requests with grammars are then refused."""
        self._grammars.exception()

    def start(self, id: int, grammar: Grammar) -> None:
        self._matchers[id] = self._thread.submit(lambda: self._grammars.result().matcher(grammar))

    def is_ready(self, id: int) -> bool:
        """Returns whether `take` need not wait for a request whose grammar was started, or will be."""
        matcher = self._matchers.get(id)
        return matcher is not None and matcher.done()

    def take(self, id: int) -> "Matcher | None":
        """The matcher of a request, which is its own from now on; None if it has no grammar. Raises UserError if that
        cannot be followed."""
        matcher = self._matchers.pop(id, None)
        return matcher.result() if matcher else None

    def drop(self, id: int) -> None:
        """Forgets the grammar of a request that has ended before it began, if it has one."""
        if matcher := self._matchers.pop(id, None):
            matcher.cancel()


def read_grammars(folder: Path, vocabulary: int, ends: Collection[int]) -> "Grammars":
    from umbra.executor.engine.schedule.grammar import Grammars  # imports llguidance, in this thread

    return Grammars.read(folder, vocabulary, ends)
