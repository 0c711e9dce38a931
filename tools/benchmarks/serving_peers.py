"""The servers of serving.py: each is started afresh, on a port of its own, and ended with its block."""

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.tools.benchmarks.serving_client import Client

START_S = 600.0
END_S = 60.0


@dataclass(frozen=True)
class ServerPeer:
    """A server to start by `command`, in which PORT stands for the port; the route `ready` answers 200 when it
    serves."""

    name: str
    command: tuple[str, ...]
    ready: str


def umbra(name: str, case: str, settings: Sequence[str]) -> ServerPeer:
    command = (sys.executable, "-m", "umbra", "serve", case, "--set", "port=PORT", *settings)
    return ServerPeer(name, command, "/health/ready")


def llama_server(program: Path, gguf: Path, threads: int, slots: int, longest: int) -> ServerPeer:
    """llama-server with the reference's settings: a batch of 2,048, micro-batches of 512, no prompt cache."""
    options = {
        "-m": gguf,
        "-t": threads,
        "-tb": threads,
        "-np": slots,
        "-c": slots * longest,
        "-b": 2048,
        "-ub": 512,
        "-cram": 0,
        "--host": "127.0.0.1",
        "--port": "PORT",
    }
    flags = [str(word) for option in options.items() for word in option]
    return ServerPeer("llama-server", (str(program), *flags, "--no-ui", "--no-cache-prompt"), "/health")


@contextmanager
def started(peer: ServerPeer) -> Iterator[Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [word.replace("PORT", str(port)) for word in peer.command]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            client, start = Client(port, process.pid), time.monotonic()
            while asyncio.run(client.get(peer.ready))[0] != 200:
                if process.poll() is not None or time.monotonic() > start + START_S:
                    log.seek(0)
                    raise UserError(f"{peer.name} does not serve: {' '.join(log.read()[-500:].split())}")
                time.sleep(0.2)
            print(f"{peer.name}: ready after {time.monotonic() - start:.1f} s", flush=True)
            yield client
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
