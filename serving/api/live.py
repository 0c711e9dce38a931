"""The live page: one HTML file, and a stream of what the server does, for those who look at it."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from starlette.responses import Response

from umbra.serving.api.errors import ApiError
from umbra.serving.api.metrics import Metrics, ServerSample
from umbra.serving.api.sse import event
from umbra.serving.ranks.client import EngineClient
from umbra.serving.ranks.messages import ChannelMessage, Ready, Running, State

PAGE = Path(__file__).with_name("live.html")
EVERY_S = 0.25  # between two looks at the state
QUIET_S = 2.0  # a state that stays the same is sent this often
MOST_WATCHERS = 32
ROWS = 32  # most requests in a state
SHARES = 0.5, 0.99

Status = Callable[[], Mapping[str, str | float | None]]


@cache
def _text() -> str:
    return PAGE.read_text()


def live_page() -> Response:
    """The page. Its policy lets the browser run the page's own script only, and connect to this server only."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(_text().replace("{{nonce}}", nonce), media_type="text/html", headers=headers)


class Live:
    """The data that the page shows. `status` gives the server's name and condition."""

    def __init__(self, client: EngineClient, metrics: Metrics, status: Status):
        self.client, self.metrics, self.status = client, metrics, status
        self.watchers = 0
        self._closed = asyncio.Event()
        self._shown: tuple[float, Any, Any, bytes] = (0.0, None, None, b"")  # time, status, state, the event of both

    def take(self, message: ChannelMessage) -> None:
        """To be called with each message of the engine that is not a row."""
        if isinstance(message, Ready):  # these ranks do not know yet whether somebody watches
            self.client.watch(self.watchers > 0)

    def close(self) -> None:
        """Ends all streams."""
        self._closed.set()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: `past` once, `state` a few times a second, and `residency` as often as it changes."""
        if self.watchers >= MOST_WATCHERS:
            raise ApiError(429, f"{MOST_WATCHERS} pages are open already", None, "too_many_watchers", 5)
        self._watch(1)
        try:
            yield event([_row(sample) for sample in self.metrics.past], "past")
            sent, residency = b"", None
            while not self._closed.is_set():
                if (state := self._state()) != sent:
                    yield (sent := state)
                if self.client.residency is not residency:
                    residency = self.client.residency
                    yield event(residency, "residency")
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), EVERY_S)
            yield self._state()
        finally:
            self._watch(-1)

    def _watch(self, change: int) -> None:
        before, self.watchers = self.watchers, self.watchers + change
        if (before > 0) != (self.watchers > 0):
            self.client.watch(self.watchers > 0)

    def _state(self) -> bytes:
        """The event about the present state, which is made once for all who watch."""
        now, status, state = time.monotonic(), self.status(), self.client.state
        at, *last, shown = self._shown
        if last != [status, state] or now - at > QUIET_S:
            shown = event({"at": round(now, 2), **status, **self._body(state, now)}, "state")
            self._shown = now, status, state, shown
        return shown

    def _body(self, state: State | None, now: float) -> dict[str, Any]:
        metrics = self.metrics
        body: dict[str, Any] = {
            "ttft": metrics.first_token.percentiles(*SHARES),
            "itl": metrics.between_tokens.percentiles(*SHARES),
            "prompts": [metrics.looked_for, metrics.cached_tokens],
            "sample": _row(metrics.past[-1]) if metrics.past else None,
        }
        if state is None:
            return body
        return body | {
            "running": [self._request(running, now) for running in state.running[:ROWS]],
            "queue": [self._request(waiting, now) for waiting in state.queue],
            "waiting": state.waiting,
            "batch": len(state.running),
            "preemptions": state.preemptions,
            "experts": [state.experts_resident, state.experts],
            "states": [state.groups[0].live_states, state.groups[0].kept_states] if state.set_frames else None,
            "exposed": round(state.shadow_exposed_s, 3),
            "rate": round(state.decode_rate, 1),
        }

    def _request(self, request: Running, now: float) -> list[float]:
        since = self.metrics.since.get(request.id, now)
        sizes = (request.prompt, request.num_computed, request.generated, request.longest, request.preemptions)
        return [request.id, *sizes, round(now - since, 1)]


def _row(sample: ServerSample) -> list[float]:
    return [round(sample.at, 2), *sample.memory.values(), round(sample.rate, 1), sample.hits, sample.misses]
