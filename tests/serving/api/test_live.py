"""The live page and its stream. tests/serving/browser.py looks at it with a browser."""

import asyncio
import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serving.api.front import Connection, Reply, Server, run, until
from umbra.serving.api import live
from umbra.serving.api.auth import ApiKeys
from umbra.serving.ranks.messages import GroupPages, Residency, Running, State

TEXT = live.PAGE.read_text()
SCRIPT = re.findall(r"<script.*?>(.*)</script>", TEXT, re.DOTALL)[0]
RESIDENCY = Residency(2, 8, b"\x0f\x01", bytes(range(16)))
STATE = State(
    step=9,
    waiting=3,
    running=[Running(i, 900, 901, 1, 1000, 0) for i in range(64)],
    groups=[GroupPages(10, 2, 30, 2, 3)],
    preemptions=1,
    queue=[Running(i, 900, 0, 0, 1000, 1) for i in range(64, 80)],
    experts_resident=5,
    experts=16,
    expert_hits=90,
    expert_misses=10,
    arena_frames=100,
    expert_frames=48,
    free_frames=4,
    set_frames=2,
)


async def watch(server: Server) -> Connection:
    connection = await server.open("/live", method="GET")
    reply = await connection.head()
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    return connection


async def next_event(connection: Connection, wanted: str) -> Any:
    """The next event of this name."""
    while True:
        block = (await asyncio.wait_for(connection.chunk(), 300)).decode()
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

    pages = run(scenario, keys=ApiKeys((b"x" * 32,)))  # the page itself needs no key
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
        assert (state["batch"], state["waiting"], state["experts"], state["states"]) == (64, 3, [5, 16], [2, 3])
        assert len(state["running"]) == live.ROWS
        assert state["running"][0][:6] == [0, 900, 901, 1, 1000, 0]
        assert len(json.dumps(state)) < 3000
        engine.send(RESIDENCY)
        event = await next_event(connection, "residency")
        assert base64.b64decode(event["resident"]) == RESIDENCY.resident
        assert base64.b64decode(event["heat"]) == RESIDENCY.heat
        other = await watch(server)  # is told at once what the first one knows
        assert await next_event(other, "residency") == event
        assert engine.watched[-1] is True
        engine.hung = False
        connection.kill()
        other.kill()
        await until(lambda: engine.watched[-1] is False)
        assert front.live.watchers == 0

    run(scenario)


def test_the_stream_needs_a_key_and_takes_few_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def closed(server: Server) -> list[int]:
        return [(await server.get(path)).status for path in ("/live", "/v1/models", "/health", "/health/ready")]

    assert run(closed, keys=ApiKeys((b"x" * 32,))) == [401, 401, 200, 200]
    monkeypatch.setattr(live, "MOST_WATCHERS", 1)

    async def full(server: Server) -> int:
        connection = await watch(server)
        await next_event(connection, "state")
        status = (await server.get("/live")).status
        connection.kill()
        return status

    assert run(full) == 429


def test_the_page_is_told_of_an_end_and_new_ranks_of_the_page() -> None:
    async def scenario(server: Server) -> None:
        connection = await watch(server)
        await next_event(connection, "state")
        await server.engine.die("the disk is full")
        state: dict[str, Any] = {"status": "serving"}
        while state["status"] == "serving":
            state = await next_event(connection, "state")
        assert state["reason"] == "the disk is full"
        assert "running" not in state
        server.engine.watched.clear()
        await server.engine.connect()
        await until(lambda: server.engine.watched)
        assert server.engine.watched == [True]
        server.front.live.close()
        while await connection.chunk():
            pass

    run(scenario)
