"""How long /health takes while others flood a server that has nothing else to do.

  .venv/bin/python -m tests.serving.floods [--seconds 10]

headers     1,500 connections, opened again when they are closed, each of which sends one byte of a header a second
bodies      16 clients that send bodies of 1 MB, all of them wrong, as fast as they are answered
requests    64 clients that send small wrong requests as fast as they are answered
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.serving.drift import part
from tests.serving.test_server import Process, server

BODIES = [b'{"prompt": "' + b"x" * (1 << 20) + b'"}', b"[" * (1 << 20), b'{"prompt": [' + b"1," * (1 << 19) + b"1]}"]
LOST = OSError, asyncio.IncompleteReadError
EVERY_S = 0.02  # between two looks at /health


async def drip(port: int) -> None:
    while True:
        with suppress(*LOST):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            for byte in b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 1000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1)


async def post(port: int, body: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    while True:
        with suppress(*LOST):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + body)
            await reader.readuntil(b"\r\n\r\n")
            writer.close()


FLOODS: dict[str, Callable[[int], list[Coroutine[Any, Any, None]]]] = {
    "headers": lambda port: [drip(port) for _ in range(1500)],
    "bodies": lambda port: [post(port, BODIES[i % len(BODIES)]) for i in range(16)],
    "requests": lambda port: [post(port, b'{"prompt": 5}') for _ in range(64)],
}


def flood(port: int, name: str) -> None:
    async def run() -> None:
        await asyncio.gather(*FLOODS[name](port))

    asyncio.run(run())


async def looks(running: Process, seconds: float) -> list[float]:
    """Seconds that each look at /health took."""
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        reply = await (await running.open("/health", None)).all()
        assert reply.status == 200
        found.append(time.perf_counter() - start)
        await asyncio.sleep(EVERY_S)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each flood")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as running:
        running.wait_until_ready()
        for name in FLOODS:
            flooding = multiprocessing.get_context("spawn").Process(target=flood, args=(running.port, name))
            flooding.start()
            time.sleep(2)
            took = [1e3 * seconds for seconds in asyncio.run(looks(running, args.seconds))]
            flooding.kill()
            flooding.join()
            spread = f"99th percentile {part(took, 0.99):.1f} ms, longest {max(took):.1f} ms"
            print(f"{name}: {len(took)} looks, median {part(took, 0.5):.1f} ms, {spread}")


if __name__ == "__main__":
    main()
