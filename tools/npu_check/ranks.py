"""Runs a function on several ranks, a process and a die each, from the process of a stage.

body(**given) -> dict runs on every rank; what it returns comes back as JSON. The ranks are in the process group of the
stage, so that they end with it. Their logs stay.
"""

import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbra.executor.config.env import rank_env
from umbra.models.registry import load
from umbra.tools.npu_check import processes

POLL_S = 0.02


class RankError(RuntimeError):
    """A rank failed; the text names it and its log."""


def run(
    function: str, size: int, environment: Mapping[str, str], logs: Path, given: dict[str, Any]
) -> list[dict[str, Any]]:
    """Runs `function` (`module:name`) on each rank, and returns their results. When one rank fails, the
    others are ended."""
    logs.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    with tempfile.TemporaryDirectory(dir=logs) as folder:
        results = Path(folder)
        (results / "given.json").write_text(json.dumps(given))
        running = {}
        for rank in range(size):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
            variables = {**environment, **{name: str(value) for name, value in own.items()}, "MASTER_ADDR": "127.0.0.1"}
            log = logs / f"rank{rank}.log"
            log.unlink(missing_ok=True)
            running[rank] = processes.start(["--rank", function, "--events", folder], variables, log, False)
        try:
            _wait(running, logs)
            return [json.loads((results / f"rank{rank}.json").read_text()) for rank in range(size)]
        finally:
            for process in running.values():
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)


def _wait(running: dict[int, processes.Process], logs: Path) -> None:
    while True:
        statuses = {rank: process.poll() for rank, process in running.items()}
        for rank, status in statuses.items():
            if status:
                log = logs / f"rank{rank}.log"
                how = processes.how_it_ended(status)
                raise RankError(f"rank {rank} {how} ({log.parent.name}/{log.name}): {processes.last_line(log)}")
        if not any(status is None for status in statuses.values()):
            return
        time.sleep(POLL_S)


def rank_process(function: str, folder: Path) -> int:
    """One rank: calls the function, leaves its result, and stays until all ranks have one, because rank 0 keeps the
    store through which the others make their communicators."""
    ranks = rank_env()
    result = load(function)(**json.loads((folder / "given.json").read_text()))
    mine = folder / f"rank{ranks.rank}.json"
    mine.with_suffix(".tmp").write_text(json.dumps(result))
    mine.with_suffix(".tmp").rename(mine)
    while len(list(folder.glob("rank*.json"))) < ranks.world_size:
        time.sleep(POLL_S)
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
    return 0


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
