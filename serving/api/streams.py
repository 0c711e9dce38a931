"""The text of one sequence while it is generated: detokenised, up to a stop string, with log-probabilities."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from umbra.executor.engine.schedule.request import TokenLogprob
from umbra.serving.api.front import Front, ServedJob, Text
from umbra.serving.api.limits import Ticket
from umbra.serving.api.request_log import CURRENT, Usage
from umbra.serving.ranks.messages import Ready
from umbra.text.stops import Stops

Item = TypeVar("Item")
UNREAD = 64  # items that wait for a reader before their sources do


class Token(NamedTuple):
    """A generated token whose log-probability is wanted."""

    id: int
    logprobs: TokenLogprob
    start: int  # characters of the answer before it


class StreamPiece(NamedTuple):
    texts: list[str]  # and marks that are tokens
    tokens: list[Token]
    finish: str = ""  # "stop", "length"; empty while it goes on
    stop: str = ""  # the stop string that ended it


@dataclass
class Stream:
    """One sequence. Closing `pieces` ends it in the engine."""

    front: Front
    text: Text
    ready: Ready
    job: ServedJob
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    async def pieces(self, ticket: Ticket) -> AsyncGenerator[StreamPiece, None]:
        """Yields what is certain, row by row; the last piece has a finish reason."""
        job = self.job
        ends = {*job.request.sampling.stop_token_ids, *(() if job.request.sampling.ignore_eos else self.ready.stop_ids)}
        detokenizer, stops = (
            self.text.tokenizer.detokenizer(job.request.ids, job.whole),
            Stops(job.stops, job.shows_stop),
        )
        decoded = given = 0  # characters of the detokenizer, and of pieces
        held: list[Token] = []
        first = True
        metrics, source, record = self.front.metrics, self.front.rows(job, ticket), CURRENT.get()
        if record:
            record.usage = self.usage
        async with metrics.arrived(len(job.request.ids), record) as timeline, aclosing(source) as rows:
            async for row in rows:
                texts: list[str] = []
                used = 0
                for index, token in enumerate(row.tokens):
                    used += 1
                    if row.logprobs:
                        held.append(Token(token, row.logprobs[index], decoded))
                    if row.finish == "stop" and token in ends and used == len(row.tokens):
                        break
                    pieces = detokenizer.pieces((token,))
                    decoded += sum(map(len, pieces))
                    texts += stops.pieces(pieces)
                    if stops.stopped:
                        break
                if row.finish and not stops.stopped:
                    texts += [*stops.pieces([detokenizer.rest()]), stops.finish()]
                if stops.stopped:  # tokens after it, as drafts give them, are no part of the answer
                    row = msgspec.structs.replace(row, tokens=row.tokens[:used], finish="stop")
                timeline.row(row)
                self.usage.completion += len(row.tokens)
                self.usage.drafted += row.drafted
                self.usage.accepted += max(0, len(row.tokens) - 1)
                if first:
                    first, self.prompt_logprobs = False, row.prompt_logprobs
                    self.usage.cached_tokens += row.cached_tokens
                given += sum(map(len, texts))
                finish = row.finish
                tokens = [token for token in held if token.start < given or (row.finish and not stops.stopped)]
                if texts or tokens or finish:
                    held = held[len(tokens) :]
                    yield StreamPiece(texts, tokens, finish, stops.stop)
                if finish:
                    return


def together(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all `sources` as they come. The error of one ends all."""
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(UNREAD)

    async def take(source: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(take(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            taken = await queue.get()
            if isinstance(taken, Exception):
                raise taken
            if taken is None:
                left -= 1
            else:
                yield taken
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Turns:
    """Lets the sequences of one request start: the second and later ones of a prompt when the first has begun, since
    they then find its prompt in the cache; and never more than `rows` together."""

    def __init__(self, rows: int):
        self._rows = asyncio.Semaphore(rows)
        self._begun: dict[int, asyncio.Event] = {}

    async def pieces(
        self, stream: Stream, prompt: int, choice: int, ticket: Ticket
    ) -> AsyncGenerator[StreamPiece, None]:
        """The pieces of `stream`, which is choice number `choice` of prompt number `prompt`."""
        begun = self._begun.setdefault(prompt, asyncio.Event())
        try:
            if choice:
                await begun.wait()
            async with self._rows, aclosing(stream.pieces(ticket)) as pieces:
                async for piece in pieces:
                    begun.set()
                    yield piece
        finally:
            begun.set()
