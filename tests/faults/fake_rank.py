"""Stands for the ranks of a server: it answers each request with the same tokens, until the front lets it leave."""

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from tests.fakes.serving_engine import FakeEngine

sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (what it finds when the front is gone is no error of the front)


async def main() -> None:
    engine = FakeEngine(Path(os.environ["UMBRA_SERVE_SOCKET"]), lambda submit: [5, 6, 7, 8], vocabulary=4096)
    await engine.connect()
    while not engine.stopped and not engine.left:
        await asyncio.sleep(0.01)


asyncio.run(main())
