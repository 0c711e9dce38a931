"""The live page and its stream. tests/serving/browser.py looks at it with a browser."""

import asyncio
import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from serving.api import live
from serving.api.auth import Keys
from serving.api.errors import ApiError
from serving.api.live import Live
from serving.api.metrics import Metrics, Sample
from serving.ranks.messages import Group, Ready, Residency, Running, State
from tests.serving.api.front import Connection, Reply, Server, until
from tests.serving.api.test_chat import run

TEXT = live.PAGE.read_text()
SCRIPT = re.findall(r"<script.*?>(.*)</script>", TEXT, re.DOTALL)[0]
RESIDENCY = Residency(2, 8, b"\x0f\x01", bytes(range(16)))
STATE = State(
    step=9, waiting=3, running=[Running(i, 900, 901, 1, 1000, 0) for i in range(64)], groups=[Group(10, 2, 30)],
    preemptions=1, queue=[Running(i, 900, 0, 0, 1000, 1) for i in range(64, 80)], experts_resident=5, experts=16,
    expert_hits=90, expert_misses=10, arena_frames=100, expert_frames=48, free_frames=4,
)  # fmt: skip

READY = Ready(416, 4, 96, 16, 50, 2, [0], 100.0)


async def watch(server: Server) -> Connection:
    connection = await server.open("/live", method="GET")
    reply = await connection.head()
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    return connection


async def next_event(connection: Connection, wanted: str) -> Any:
    """The next event of this name."""
    while True:
        block = (await asyncio.wait_for(connection.chunk(), 30)).decode()
        assert block, "the stream has ended"
        name, data = re.fullmatch(r"(?:event: (\w+)\n)?(?:data|): (.*)\n\n", block, re.DOTALL).groups()  # type: ignore[union-attr]
        if name == wanted:
            return json.loads(data)


def test_the_page_is_small_and_asks_nobody_else() -> None:
    assert len(TEXT.encode()) < 40_000
    assert not re.findall(r"https?://|//cdn|@import|\bsrc=|url\(", TEXT)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", TEXT)
    assert not re.findall(r"\son\w+=|\sstyle=", TEXT), "the policy forbids these attributes"
    for name in re.findall(r'\$\("([\w-]+)"\)', SCRIPT):
        assert f'id="{name}"' in TEXT, name


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_the_pages_script_is_javascript(tmp_path: Path) -> None:
    (tmp_path / "page.js").write_text(SCRIPT)
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True)


def test_the_page_runs_its_own_script_only() -> None:
    async def scenario(server: Server) -> list[Reply]:
        return [await server.get("/"), await server.get("/")]

    pages = run(scenario, keys=Keys((b"x" * 32,)))  # the page itself needs no key
    nonces = set()
    for page in pages:
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["connect-src"] == "'self'"
        # Header values are lower case here.
        used = set(re.findall(r'nonce="([^"]+)"', page.body.decode()))
        assert {f"'nonce-{nonce.lower()}'" for nonce in used} == {policy["script-src"]} == {policy["style-src"]}
        assert "{{" not in page.body.decode()
        nonces |= used
    assert len(nonces) == 2


def test_what_the_server_does_is_told_to_those_who_watch() -> None:
    async def scenario(server: Server) -> None:
        engine, front = server.engine, server.front
        connection = await watch(server)
        assert await next_event(connection, "past") == []
        state = await next_event(connection, "state")
        assert (state["model"], state["status"]) == ("demo_chat", "serving")
        await until(lambda: engine.watched)
        engine.hung = True  # it sends nothing of its own
        engine.send(STATE)
        await until(lambda: front.client.state == STATE)
        while "queue" not in state or not state["queue"]:
            state = await next_event(connection, "state")
        assert (state["batch"], state["waiting"], state["experts"]) == (64, 3, [5, 16])
        assert len(state["running"]) == live.ROWS
        assert state["running"][0][:6] == [0, 900, 901, 1, 1000, 0]
        assert len(json.dumps(state)) < 3000
        engine.send(RESIDENCY)
        found = await next_event(connection, "residency")
        assert base64.b64decode(found["resident"]) == RESIDENCY.resident
        assert base64.b64decode(found["heat"]) == RESIDENCY.heat
        other = await watch(server)  # is told at once what the first one knows
        assert await next_event(other, "residency") == found
        assert engine.watched[-1] is True
        engine.hung = False
        connection.kill()
        other.kill()
        await until(lambda: engine.watched[-1] is False)
        assert front.live.watchers == 0

    run(scenario)


def test_states_come_at_most_four_times_a_second() -> None:
    async def scenario(server: Server) -> float:
        connection = await watch(server)
        await next_event(connection, "state")
        start = asyncio.get_running_loop().time()
        for _ in range(4):
            await next_event(connection, "state")
        return asyncio.get_running_loop().time() - start

    assert run(scenario) > 0.9  # the engine sends fifty a second


def test_samples_add_up_and_are_kept_for_pages_that_open_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.api.metrics.PAST_S", 0.0)

    async def scenario(server: Server) -> None:
        server.engine.hung = True
        for _ in range(400):
            server.engine.send(STATE)
        past = server.front.metrics.past
        await until(lambda: len(past) == past.maxlen)
        rows = await next_event(await watch(server), "past")
        assert len(rows) == past.maxlen
        assert rows[-1][1:5] == [18, 30, 48, 4]
        assert sum(rows[-1][1:5]) == STATE.arena_frames
        assert rows[-1][6:] == [90, 10]

    run(scenario)


def test_the_stream_needs_a_key_and_takes_few_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def closed(server: Server) -> int:
        return (await server.get("/live")).status

    assert run(closed, keys=Keys((b"x" * 32,))) == 401
    monkeypatch.setattr(live, "MOST_WATCHERS", 1)

    async def full(server: Server) -> int:
        connection = await watch(server)
        await next_event(connection, "state")
        status = (await server.get("/live")).status
        connection.kill()
        return status

    assert run(full) == 429


def test_the_page_is_told_of_an_end() -> None:
    async def scenario(server: Server) -> None:
        connection = await watch(server)
        await next_event(connection, "state")
        await server.engine.die("the disk is full")
        state: dict[str, Any] = {"status": "serving"}
        while state["status"] == "serving":
            state = await next_event(connection, "state")
        assert state["reason"] == "the disk is full"
        assert "running" not in state
        server.front.live.close()
        while await connection.chunk():
            pass

    run(scenario)


def test_ranks_that_start_again_learn_that_somebody_watches() -> None:
    async def scenario(server: Server) -> None:
        connection = await watch(server)
        await next_event(connection, "state")
        await server.engine.die()
        await until(lambda: not server.front.client.alive)
        server.engine.watched.clear()
        await server.engine.connect()
        await until(lambda: server.engine.watched)
        assert server.engine.watched == [True]
        connection.kill()

    run(scenario)


class Watched:
    """A client that keeps what ranks are told about those who watch."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.residency: Residency | None = None
        self.told: list[bool] = []

    def watch(self, residency: bool) -> None:
        self.told.append(residency)


class Page:
    """What the page shows, at times that are made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.status = 1000.0, {"status": "serving", "model": "m"}
        self.client, self.metrics = Watched(), Metrics("m")
        monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.live = Live(self.client, self.metrics, lambda: self.status)  # type: ignore[arg-type]

    def shown(self) -> dict[str, Any]:
        name, data = self.live._state().decode().rstrip("\n").split("\n")
        assert name == "event: state"
        found: dict[str, Any] = json.loads(data.removeprefix("data: "))
        return found


def test_a_state_before_and_with_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(monkeypatch)
    page.now = 1000.126
    nothing = {
        "at": 1000.13, "status": "serving", "model": "m", "ttft": [None, None], "itl": [None, None], "prompts": [0, 0],
        "sample": None,
    }  # fmt: skip
    assert page.shown() == nothing
    page.metrics.looked_for, page.metrics.found = 40, 16
    for number in range(1, 101):
        page.metrics.first_token.add(float(number))
        page.metrics.between_tokens.add(number / 100)
    memory = {"sequences": 18, "prefixes": 30, "experts": 48, "free": 4}
    page.metrics.past.append(Sample(990.006, memory, 1.25, 7, 8))
    page.metrics.past.append(Sample(999.126, memory, 3.26, 90, 10))
    page.metrics.since = {0: 990.04, 64: 1000.0}
    page.client.state = msgspec.structs.replace(STATE, shadow_exposed_s=0.12345, decode_rate=12.345)
    page.now = 1001.0
    state = page.shown()
    running = [[i, 900, 901, 1, 1000, 0, 0.0] for i in range(32)]
    running[0][-1] = 11.0
    queue = [[i, 900, 0, 0, 1000, 1, 0.0] for i in range(64, 80)]
    queue[0][-1] = 1.0
    assert state == {
        "at": 1001.0, "status": "serving", "model": "m", "ttft": [51.0, 100.0], "itl": [0.51, 1.0], "prompts": [40, 16],
        "sample": [999.13, 18, 30, 48, 4, 3.3, 90, 10], "running": running, "queue": queue, "waiting": 3, "batch": 64,
        "preemptions": 1, "experts": [5, 16], "exposed": 0.123, "rate": 12.3,
    }  # fmt: skip


def test_a_state_is_made_once_for_all_who_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again when it changes, and after a while."""
    page = Page(monkeypatch)
    first = page.live._state()
    page.now += 2.0
    assert page.live._state() is first
    page.now += 0.25
    second = page.live._state()
    assert second != first
    page.status = {"status": "draining"}
    third = page.live._state()
    assert b"draining" in third
    page.client.state = STATE
    fourth = page.live._state()
    assert b'"batch":64' in fourth
    assert page.live._state() is fourth


def test_who_watches_is_told_to_ranks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(monkeypatch)
    assert page.live.watchers == 0
    page.live.take(READY)
    page.live._watch(1)
    page.live._watch(1)
    page.live.take(READY)
    page.live.take(STATE)
    page.live._watch(-1)
    page.live._watch(-1)
    assert page.client.told == [False, True, True, False]
    assert page.live.watchers == 0


def test_a_page_s_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its past, its state as often as it changes, and where experts are; and the state once more at the end."""
    page = Page(monkeypatch)
    monkeypatch.setattr(live, "EVERY_S", 0.0)
    page.metrics.past.append(Sample(990.0, {"a": 1}, 1.25, 7, 8))

    async def scenario() -> list[bytes]:
        events = page.live.events()
        found = [await anext(events), await anext(events)]
        assert page.client.told == [True]
        page.client.residency = RESIDENCY
        found.append(await anext(events))
        page.status = {"status": "draining"}
        found.append(await anext(events))
        page.live.close()
        found.extend([event async for event in events])
        return found

    past, state, residency, draining, last = asyncio.run(scenario())
    assert past == b"event: past\ndata: [[990.0,1,1.2,7,8]]\n\n"
    assert b'"status":"serving"' in state
    assert residency.startswith(b'event: residency\ndata: {"type":"Residency","layers":2,')
    assert b'"status":"draining"' in draining
    assert last == draining
    assert (page.client.told, page.live.watchers) == ([True, False], 0)


def test_few_pages_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(monkeypatch)

    async def scenario() -> None:
        page.live.watchers = live.MOST_WATCHERS - 1
        events = page.live.events()
        await anext(events)
        with pytest.raises(ApiError) as raised:
            await anext(page.live.events())
        error = raised.value
        assert (error.status, error.param, error.code, error.retry_s) == (429, None, "too_many_watchers", 5)
        assert str(error) == f"{live.MOST_WATCHERS} pages are open already"
        await events.aclose()
        assert page.live.watchers == live.MOST_WATCHERS - 1

    asyncio.run(scenario())
