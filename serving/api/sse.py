"""Answers over HTTP that end when their client goes away: JSON at once, or server-sent events as they come."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from umbra.base.errors import UserError
from umbra.serving.api.errors import ApiError

PING_S = 15.0  # a stream on which nothing has come for this long gets a comment, so that nobody on the way closes it
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled, and has ended, when this raises ClientGone. The request's body must
    have been read before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task)
        await _end(gone)
        del task  # an error of it would lead to this frame, and so to itself: garbage with all that was read


def event(data: Any, name: str = "") -> bytes:
    """One server-sent event with `data` as JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def failure(error: ApiError) -> bytes:
    """The last event of a stream that fails, as in OpenAI's API."""
    return event(error.envelope())


class EventStream(Response):
    """Sends `events`, each one or several whole server-sent events. An ApiError among them is sent as the event that
    `failure` makes of it, and ends the stream. Make it with `start`."""

    media_type = "text/event-stream"
    ping = PING  # empty: none may come between events

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        first: "asyncio.Future[bytes]",
        failure: Callable[[ApiError], bytes] = failure,
    ):
        super().__init__()
        self.headers.update(HEADERS)
        del self.headers["content-length"]
        self.events, self.first, self.failure = events, first, failure

    @classmethod
    async def start(
        cls, request: Request, events: AsyncGenerator[bytes, None], failure: Callable[[ApiError], bytes] = failure
    ) -> "EventStream":
        """Waits a while for the first event, so that a request that cannot run is answered with its status."""
        first = asyncio.ensure_future(anext(events))
        gone = asyncio.ensure_future(_gone(request.receive))
        try:
            await asyncio.wait({first, gone}, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not first.done():
                raise ClientGone
            if first.done():
                first.result()
        except BaseException:
            await _end(first)
            await events.aclose()
            raise
        finally:
            await _end(gone)
        return cls(events, first, failure)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _end(sending)
            await _end(gone)
            await _end(self.first)
            await self.events.aclose()

    async def _send(self, send: Send) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            self.sent_at = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        self.sent_at = time.monotonic()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pings = asyncio.ensure_future(self._pings(body))
        try:
            await body(await self.first)
            async for data in self.events:
                await body(data)
        except StopAsyncIteration:
            pass  # there was no first event
        except ApiError as error:
            await body(self.failure(error))
        except UserError as error:  # of the checkpoint's files, such as a tokenizer that fails
            await body(self.failure(ApiError(500, str(error), None, "internal_error")))
        finally:
            await _end(pings)
        await body(b"", more=False)

    async def _pings(self, body: Callable[[bytes], Coroutine[Any, Any, None]]) -> None:
        while self.ping:
            await asyncio.sleep(max(0.0, self.sent_at + PING_S - time.monotonic()))
            if time.monotonic() - self.sent_at >= PING_S:
                await body(self.ping)


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(future: "asyncio.Future[Any]") -> None:
    """Cancels what still runs, and returns when it has ended."""
    if not future.done():
        future.cancel()
        await asyncio.wait({future})
    if not future.cancelled():
        with contextlib.suppress(BaseException):
            future.exception()
