"""Measures how long a server takes to start, and how long its first requests with log-probabilities, a JSON schema and
a demanded tool stop the answers of others.

    umbra bench first_requests MODEL [MODEL ...] [--set KEY=VALUE ...]

Each model is served once for each kind of request. A stream of tokens runs while the request comes, and once more
while a second one does: the first one should cost no more.
"""

import argparse
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from umbra.base.errors import UserError, run_main

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "horse"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add_animal", "parameters": SCHEMA}}
REQUESTS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 5, "max_tokens": 8},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}},
        "max_tokens": 48,
    },
    "tool": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 64},
}
MESSAGES = [{"role": "user", "content": "Name an animal."}]
START_S = 300.0
SETTLED = 16  # tokens of the stream before the first request


class StreamTimes:
    """A stream: when its pieces came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.ended = threading.Event()

    def longest_pause(self, since: float, until: float) -> float:
        """Returns the longest time between two pieces of which the later one came after `since`, and the earlier one
        before `until`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in pairs if b > since and a < until), default=0.0)


class StartedServer:
    """`umbra serve` of `model` in a process of its own, until `close`."""

    def __init__(self, model: str, settings: list[str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.begun = time.monotonic()
        self.first_line_s = 0.0
        command = [sys.executable, "-m", "umbra", "serve", model, "--set", f"port={self.port}", *settings]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._output = cast(BinaryIO, self.process.stdout)
        self.ready_s = self._await_ready()
        threading.Thread(target=self._drain, daemon=True).start()

    def _await_ready(self) -> float:
        output, lines = self._output, b""
        while not re.search(rb"^ready: .*\n", lines, re.MULTILINE):
            left = self.begun + START_S - time.monotonic()
            readable, _, _ = select.select([output], [], [], max(0.0, left))
            data = os.read(output.fileno(), 65536) if readable else b""
            if not data:
                self.close()
                raise UserError(f"the server has not become ready: {lines.decode(errors='replace')[-500:]}")
            self.first_line_s = self.first_line_s or time.monotonic() - self.begun
            lines += data
        return time.monotonic() - self.begun

    def _drain(self) -> None:
        while os.read(self._output.fileno(), 65536):
            pass

    def ask(self, body: dict[str, Any]) -> float:
        """Sends a chat. -> the seconds until its whole answer was there"""
        start = time.monotonic()
        with urllib.request.urlopen(self._request(body)) as reply:
            reply.read()
        return time.monotonic() - start

    def stream(self, answer: StreamTimes) -> None:
        """Reads a long answer piece by piece until `answer.ended`."""
        body = {"stream": True, "ignore_eos": True, "max_tokens": 1500, "temperature": 1.0}
        while not answer.ended.is_set():
            with urllib.request.urlopen(self._request(body)) as reply:
                for line in reply:
                    if line.startswith(b"data: {"):
                        answer.times.append(time.monotonic())
                    if answer.ended.is_set():
                        break

    def _request(self, body: dict[str, Any]) -> urllib.request.Request:
        data = json.dumps({"messages": MESSAGES, **body}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        return urllib.request.Request(url, data, {"content-type": "application/json"})

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


@contextmanager
def serving(model: str, settings: list[str]) -> Iterator[StartedServer]:
    server = StartedServer(model, settings)
    try:
        yield server
    finally:
        server.close()


def measure(server: StartedServer, body: dict[str, Any]) -> dict[str, float]:
    """The longest pauses of a stream while nothing else runs, and while the first and the second request with `body`
    do; and how long these take."""
    answer = StreamTimes()
    thread = threading.Thread(target=server.stream, args=(answer,), daemon=True)
    thread.start()
    while len(answer.times) < SETTLED:
        time.sleep(0.01)
    start = time.monotonic()
    time.sleep(1)
    seconds = {"alone": answer.longest_pause(start, time.monotonic())}
    for name in ("first", "second"):
        since = time.monotonic()
        seconds[f"{name} request"] = server.ask(body)
        time.sleep(0.5)
        seconds[f"pause of {name}"] = answer.longest_pause(since, time.monotonic())
    answer.ended.set()
    thread.join()
    return seconds


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a case or a checkpoint, as of `umbra serve`")
    parser.add_argument("--requests", nargs="+", choices=REQUESTS, default=list(REQUESTS), help="default: all kinds")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the servers")
    args = parser.parse_args(argv)
    for model in args.models:
        for name in args.requests:
            with serving(model, args.set) as server:
                seconds = measure(server, REQUESTS[name])
                times = {"first line": server.first_line_s, "ready": server.ready_s, **seconds}
                said = ", ".join(f"{what} {value:.2f}" for what, value in times.items())
                print(f"{model}: {name}: seconds: {said}", flush=True)


if __name__ == "__main__":
    run_main(main)
