"""Starts the ranks, notices when they die or hang, and starts them again if the case allows it."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from executor.config.case import Case
from executor.serving.client import EngineClient
from files import ROOT

SOCKET = "UMBRA_SERVE_SOCKET"
CHECK_S = 0.5
END_S = 10.0  # seconds that ranks have to leave before they are killed
STACKS_S = 1.0  # seconds to write the stacks of hung ranks


class Supervisor:
    """Of the ranks of `case`, which connect to `client`. `told` is called with each line that a person should read."""

    def __init__(self, case: Case, overrides: list[str], client: EngineClient, told: Callable[[str], None] = print):
        self.case, self.overrides, self.client, self.told = case, overrides, client, told
        self.restarts = 0  # how often ranks were started again
        self.failed = ""  # why there are no ranks and will be none
        self.stopping = False
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keeps ranks running until `stop` is called, or they have failed too often; `failed` then says why."""
        while True:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "executor.serving.ranks", self.case.name, *(f"--set={s}" for s in self.overrides),
                cwd=ROOT, env=os.environ | {SOCKET: str(self.client.path)}, stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            if self.stopping:
                await self._end_all()
            hung = asyncio.create_task(self._end_if_hung())
            status = await self._process.wait()
            hung.cancel()
            await self._end_all()
            if self.stopping:
                return
            reason = self.client.reason or f"the ranks ended with status {status}"
            if self.restarts >= self.case.serve_config.restarts:
                self.failed = reason
                self.told(f"error: {reason}")
                return
            self.restarts += 1
            self.told(f"{reason}; starting the ranks again ({self.restarts} of {self.case.serve_config.restarts})")

    async def stop(self, wait_s: float = END_S) -> None:
        """Ends all ranks: those that serve are asked to leave together, and all are killed after `wait_s` seconds."""
        self.stopping = True
        self.client.stop()
        if self._process and self._process.returncode is None and self.client.ready:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), wait_s)
        await self._end_all()

    async def _end_if_hung(self) -> None:
        """Ends the ranks if they should work and nothing is heard of them."""
        while True:
            await asyncio.sleep(CHECK_S)
            client = self.client
            silent = time.monotonic() - max(client.rows_at, client.pong_at)
            if client.ready and silent > self.case.serve_config.step_timeout_s:
                client.reason = (
                    f"the ranks have not answered for {silent:.0f} s: their stacks are in the results folder"
                )
                for pid in self._ranks():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)
                await asyncio.sleep(STACKS_S)
                await self._end_all()
                return

    async def _end_all(self) -> None:
        """Kills every process that was started for these ranks, and returns when none is left."""
        pids = list(self._ranks())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(Path(f"/proc/{pid}").exists() and _is_running(pid) for pid in pids):
            await asyncio.sleep(0.01)

    def _ranks(self) -> Iterator[int]:
        """The processes of the launcher and its ranks: those that have this front's socket in their environment."""
        wanted = f"{SOCKET}={self.client.path}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        yield int(entry.name)


def _is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
