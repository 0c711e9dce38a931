"""Starts the ranks, notices when they die or hang, says why, and starts them again if the case allows it."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import cast

from umbra.base.errors import EXIT_STATUS
from umbra.base.files import WORK
from umbra.executor.config.case import Case
from umbra.executor.config.env import node_env
from umbra.executor.launch.processes import is_running
from umbra.serving.ranks.client import ENDED, EngineClient
from umbra.serving.ranks.processes import SOCKET, RankProcess, processes_of, send, signal_name

CHECK_S = 0.5
END_S = 10.0  # seconds that ranks have to leave before they are killed
LAUNCHER_S = 3.0  # seconds that a launcher has to clean up
NODES_S = 10.0  # and to tell those of other nodes why it ends
STACKS_S = 1.0  # seconds to write the stacks of hung ranks
PATIENCE = 10  # a step that takes this many times longer than any before it hangs, if it takes `step_timeout_s`
LONGEST_LINE = 4096  # bytes of an error line
# The part of a launcher's error line that only its user needs.
LOGS = re.compile("; (all ranks' logs|logs on each node): .*")


class Supervisor:
    """Starts the ranks of `case`, which connect to `client`, and starts them again after a failure. `launcher` has the
    arguments with which Python starts them. `report` is called with each line that a person should read."""

    def __init__(
        self, case: Case, launcher: Sequence[str], client: EngineClient, report: Callable[[str], None] = print
    ):
        self.case, self.launcher, self.client, self.report = case, launcher, client, report
        self.restarts = 0  # how often ranks were started again
        self.failed = ""  # why there are no ranks and will be none
        self.stopping = False
        self.status: int | None = None  # exit status of the last launcher
        self._process: asyncio.subprocess.Process | None = None
        self._hung = ""  # why this supervisor has ended the ranks
        self._before = ""  # why the ranks before these have ended
        self._error = ""  # the last error line of the launcher
        self._notice = ""  # the last line in which it said that a node is slow
        client.supervised = True

    async def run(self) -> None:
        """Keeps ranks running until `stop` is called, or they have failed too often; `failed` then says why."""
        while True:
            self._hung = self._error = self._notice = ""
            self.client.reason = self._before = self.client.reason if self.restarts else ""
            process = self._process = await self._start()
            if self.stopping:  # called while the process was started
                await self._end_all()
            errors = asyncio.create_task(self._read_errors(cast(asyncio.StreamReader, process.stderr)))
            watch = asyncio.create_task(self._watch(process.pid))
            self.status = await process.wait()
            watch.cancel()
            await self._end_all()
            await errors
            if self.stopping:
                self.client.lost(self.client.reason or ENDED, again=False)
                return
            line = self._reason(process.pid, self.status)
            reason = LOGS.sub("", line)
            again = self.status != EXIT_STATUS and self.restarts < self.case.serve_config.restarts
            self.client.lost(reason, again)
            if not again:
                self.failed = reason
                self.report(f"error: {line}")
                return
            self.restarts += 1
            self.report(f"{line}; starting the ranks again ({self.restarts} of {self.case.serve_config.restarts})")

    async def stop(self, wait_s: float = END_S) -> None:
        """Ends all ranks: those that serve are asked to leave together, and all are killed after `wait_s` seconds."""
        self.stopping = True
        if self.client.ready and self._process:
            self.client.stop()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), wait_s)
        await self._end_all()

    def processes(self) -> list[RankProcess]:
        """The launcher and the ranks that run on this machine."""
        processes = processes_of(self.client.path)
        return (
            [RankProcess(p.pid, 0) for p in processes] if self.case.world_size == 1 else processes
        )  # it replaces its launcher

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *self.launcher,
            cwd=WORK,
            env=os.environ | {SOCKET: str(self.client.path)},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        """Passes on what the launcher writes to stderr, except its error line, which is kept."""
        rest = b""
        while data := await stream.read(65536):
            *lines, rest = (rest + data).split(b"\n")
            lines, rest = (lines, rest) if len(rest) < LONGEST_LINE else ([*lines, rest], b"")
            for line in lines:
                if line.startswith(b"error: "):
                    self._error = line[len(b"error: ") : LONGEST_LINE].decode(errors="replace")
                    continue
                if line.startswith(b"node "):
                    self._notice = line[:LONGEST_LINE].decode(errors="replace")
                with contextlib.suppress(OSError):
                    os.write(2, line + b"\n")

    def _reason(self, launcher: int, status: int) -> str:
        """Why the ranks ended, whose launcher had this process id and exit status."""
        if self._hung or self._error:
            return self._hung or self._error
        alone = self.case.world_size == 1
        who = f"{'rank 0' if alone else 'the launcher'} (pid {launcher}) failed"
        if status < 0 or status > 128:
            return f"{who}: killed by {signal_name(-status if status < 0 else status - 128)}"
        if alone and status:
            said = "" if self.client.reason in (ENDED, self._before) else self.client.reason
            return f"{who}: exit status {status}" + (f": {said}" if said else "")
        return self.client.reason or f"the ranks have ended with exit status {status}"

    async def _watch(self, launcher: int) -> None:
        """Ends the ranks if they hang, if rank 0 has left and the launcher does not notice, or if the launcher, whose
        process id is given, has ended without them: it counts as running while ranks hold its stderr."""
        client, came, limits = self.client, False, self.case.parallel_config
        # Where there are several nodes, their launchers first find out which one is the reason.
        notice_s = END_S if node_env().nnodes == 1 else END_S + limits.node_timeout_s
        while not self._hung and is_running(launcher):
            await asyncio.sleep(CHECK_S)
            came = came or client.alive
            patience = max(self.case.serve_config.step_timeout_s, PATIENCE * client.longest_step)
            if came and not client.alive:
                await asyncio.sleep(notice_s)
                self._hung = client.reason
            elif client.ready and client.silent_s > patience:
                ranks = [process for process in self.processes() if process.rank is not None]
                halted = [f"rank {p.rank} (pid {p.pid})" for p in ranks if p.stopped]
                self._hung = f"the ranks have not answered for {client.silent_s:.0f} s" + (
                    f": {', '.join(halted)} halted by a signal" if halted else self._notice and f": {self._notice}"
                )
                send(signal.SIGUSR1, ranks)  # they write their stacks
                self.report(f"{self._hung}; the stacks of all ranks are in {client.ready.results}")
                await asyncio.sleep(STACKS_S)
        await self._end_all()

    async def _end_all(self) -> None:
        """Ends every rank and its launcher, and returns when none is left."""
        processes, alone = self.processes(), node_env().nnodes == 1
        send(signal.SIGKILL, [process for process in processes if process.rank is not None])
        if alone or self.stopping:  # it removes its files; to launchers of other nodes, this signal is the end for good
            send(signal.SIGTERM, [process for process in processes if process.rank is None])
        while not await _ended(processes, LAUNCHER_S if alone else NODES_S):
            processes = self.processes()
            send(signal.SIGKILL, processes)


async def _ended(processes: list[RankProcess], within_s: float) -> bool:
    """Waits until all `processes` have ended. -> whether they have"""
    deadline = time.monotonic() + within_s
    while any(is_running(process.pid) for process in processes):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True
