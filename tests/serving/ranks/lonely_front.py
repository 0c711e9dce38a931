"""A front that starts faulty ranks, and says when they load or, in another phase, are ready."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from umbra.executor.config.load import load_case
from umbra.serving.ranks.client import EngineClient
from umbra.serving.ranks.launcher import launcher_of
from umbra.serving.ranks.supervisor import Supervisor


async def main(case: str, path: Path, phase: str) -> None:
    client = EngineClient(path)
    await client.listen()
    opened = load_case(case)
    launcher = ["tests/serving/ranks/faulty_ranks.py", *launcher_of(opened, path.parent)[2:]]
    supervisor = Supervisor(opened, launcher, client)
    running = asyncio.create_task(supervisor.run())
    while not (client.alive if phase == "load" else client.ready):
        await asyncio.sleep(0.05)
    print("reached", flush=True)
    await running


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
