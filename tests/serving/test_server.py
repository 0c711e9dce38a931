"""A whole server of the demo model, started as users start it: answers, its end by signals, ranks that are killed."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import free_port
from tests.serving.api.front import Connection, Reply, connect
from umbra.base.files import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.beside]
START_S = 240.0
CHAT = {"messages": [{"role": "user", "content": "Do you like dancing?"}], "temperature": 0}


class Process:
    """`umbra serve` in a process of its own, with its temporary folder in `folder`."""

    def __init__(self, folder: Path, *settings: str):
        self.port, self.folder = free_port(), folder
        command = [sys.executable, "-m", "umbra", "serve", "demo_chat", "--set", f"port={self.port}", "threads=1"]
        command += settings
        self.log = open(folder / "log.txt", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=self.log, stderr=subprocess.STDOUT, env=os.environ | {"TMPDIR": str(folder)}
        )

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        while self.ask("/health/ready").status != 200:
            assert time.monotonic() < end, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.2)

    def ask(self, path: str, data: Any = None) -> Reply:
        """Status 0: nobody listens."""
        return asyncio.run(self.reply(path, data))

    async def reply(self, path: str, data: Any) -> Reply:
        try:
            return await (await self.open(path, data)).all()
        except (OSError, asyncio.IncompleteReadError):
            return Reply(0, {})

    async def open(self, path: str, data: Any, **more: Any) -> Connection:
        return await connect(self.port, path, data, **{"method": "GET" if data is None else "POST"} | more)

    @property
    def text(self) -> str:
        return (self.folder / "log.txt").read_text()

    def ranks(self) -> list[int]:
        """Processes that have this server's socket in their environment."""
        pids, wanted = [], f"UMBRA_SERVE_SOCKET={self.folder}/".encode()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes():
                    pids.append(int(entry.name))
        return pids

    def wait(self) -> int:
        return self.process.wait(300)

    def check_nothing_is_left(self) -> None:
        assert self.ranks() == []
        assert list(self.folder.glob("umbra-*")) == []


@contextmanager
def server(folder: Path, *settings: str) -> Iterator[Process]:
    process = Process(folder, *settings)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
        for pid in process.ranks():
            os.kill(pid, signal.SIGKILL)
        process.log.close()


def test_answers_and_an_orderly_end(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        running.wait_until_ready()
        assert len(re.findall(r"^ready: .*$", running.text, re.M)) == 1
        (folder,) = tmp_path.glob("umbra-*")
        assert folder.stat().st_mode & 0o777 == 0o700

        first = running.ask("/v1/chat/completions", CHAT).json
        again = running.ask("/v1/chat/completions", CHAT).json
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
        streamed = running.ask("/v1/chat/completions", CHAT | {"stream": True}).events[:-1]
        said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed)
        assert said == first["choices"][0]["message"]["content"]

        prompt = {"prompt": "Emma was very", "max_tokens": 0, "echo": True, "logprobs": 1}
        logprobs = running.ask("/v1/completions", prompt).json["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == "Emma was very"
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])

        schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}}
        wanted = {"type": "json_schema", "json_schema": {"schema": schema | {"required": ["age"]}}}
        answer = running.ask("/v1/chat/completions", CHAT | {"response_format": wanted, "max_tokens": 60}).json
        if answer["choices"][0]["finish_reason"] == "stop":
            assert 0 <= json.loads(answer["choices"][0]["message"]["content"])["age"] < 100

        tool = {
            "type": "function",
            "function": {
                "name": "dance",
                "parameters": {
                    "type": "object",
                    "properties": {"often": {"type": "boolean"}},
                    "required": ["often"],
                    "additionalProperties": False,
                },
            },
        }
        called = running.ask("/v1/chat/completions", CHAT | {"tools": [tool], "tool_choice": "required"}).json
        call = called["choices"][0]["message"]["tool_calls"][0]["function"]
        assert call["name"] == "dance"
        assert isinstance(json.loads(call["arguments"])["often"], bool)

        async def drained() -> Reply:
            body = {"prompt": "Emma", "max_tokens": 300, "stream": True, "ignore_eos": True}
            stream = await running.open("/v1/completions", body)
            await stream.head()
            running.process.send_signal(signal.SIGTERM)
            while (await running.reply("/health/ready", None)).json["status"] != "draining":
                await asyncio.sleep(0.01)
            assert (await running.reply("/v1/completions", body)).error["code"] == "draining"
            while data := await stream.chunk():
                stream.reply.body += data
            return stream.reply

        events = asyncio.run(drained()).events
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert running.wait() == 0
        running.check_nothing_is_left()
        assert "Traceback" not in running.text


@pytest.mark.thorough
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with server(tmp_path, "max_new_tokens=1700") as running:
        running.wait_until_ready()

        async def forced() -> None:
            body = {"prompt": "Emma", "max_tokens": 1600, "stream": True, "ignore_eos": True}
            stream = await running.open("/v1/completions", body)
            await stream.head()
            running.process.send_signal(signal.SIGINT)
            while (await running.reply("/health/ready", None)).json["status"] != "draining":
                await asyncio.sleep(0.01)
            running.process.send_signal(signal.SIGTERM)

        asyncio.run(forced())
        assert running.wait() == 128 + signal.SIGTERM
        running.check_nothing_is_left()


@pytest.mark.thorough
def test_a_signal_while_the_model_loads(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        while running.ask("/health").status != 200:
            time.sleep(0.05)
        assert running.ask("/health/ready").json["status"] == "loading"
        assert running.ask("/v1/chat/completions", CHAT).error["code"] == "loading"
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        running.check_nothing_is_left()


@pytest.mark.thorough
def test_ranks_are_started_again_once(tmp_path: Path) -> None:
    with server(tmp_path, "--restarts", "1") as running:
        running.wait_until_ready()

        async def killed() -> Any:
            body = {"prompt": "Emma", "max_tokens": 1500, "n": 8, "stream": True, "ignore_eos": True}
            rank = running.ranks()[0]  # looked for before the answer begins, which could end meanwhile
            stream = await running.open("/v1/completions", body)
            await stream.head()
            await stream.chunk()
            os.kill(rank, signal.SIGKILL)
            received = b""
            while data := await stream.chunk():
                received += data
            while (await running.reply("/health/ready", None)).status == 200:
                await asyncio.sleep(0.01)
            return json.loads(received.split(b"data: ")[-1])

        last = asyncio.run(killed())
        assert last["error"]["code"] == "engine_gone"
        running.wait_until_ready()
        assert running.ask("/v1/chat/completions", CHAT).status == 200
        os.kill(running.ranks()[0], signal.SIGKILL)
        assert running.wait() == 1
        running.check_nothing_is_left()


def test_what_is_refused_before_it_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for settings, words in [(f"port={taken.getsockname()[1]}", "cannot be used"), ("host=0.0.0.0", "api_key_file")]:
            with server(tmp_path, settings) as refused:
                assert refused.wait() == 2
                _, line = refused.text.splitlines()  # the first says what is served
                assert line.startswith("error: ")
                assert words in line
