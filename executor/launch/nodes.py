"""The launchers of a job on several nodes: they meet, notice that one of them is gone, and end for one reason.

torchrun's static rendezvous and its agent start, watch and end the ranks of each node. Two things they lack: an agent
does not notice that another one has died, halted or failed while its own ranks wait for those of the other (a
keep-alive of torchrun's other rendezvous counts for the next round only), and it does not tell the others why it ends.
So each launcher writes a line about itself into torchrun's store once a second and reads those of all. The agent asks
its rendezvous ten times a second whether nodes are waiting; this one raises `JobEnds` when there is a reason to end,
on which the agent ends its ranks. Nothing here depends on the device or its collectives.
"""

import math
import secrets
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from umbra.base.errors import UserError, listed
from umbra.executor.config.env import NodeEnv
from umbra.executor.launch.causes import Cause

BEAT_S = 1.0  # seconds between two looks at all lines
CHECK_S = 0.25
LOSS_S = 5.0  # seconds of silence that suffice once a rank has lost its connection to another one
LINGER_S = 5.0  # seconds that node 0 keeps the store open, so that others can read why the job ends
CONNECT_S = 5  # of one attempt to reach the store
TELL_S, TELL_AGAIN_S = 10.0, 60.0  # when a launcher says that it waits for others
LONGEST = 2000  # characters of a reason
JOB = "umbra/job"


class JobEnds(Exception):
    """Ends torchrun's agent on this node, and with it the ranks."""

    def __init__(self, cause: Cause):
        super().__init__(cause.text)
        self.cause = cause


class LauncherLine(msgspec.Struct):
    """The report of a launcher about itself."""

    start: str  # another one at each start of a launcher
    host: str
    beat: int = 0
    cause: Cause | None = None
    left: bool = False  # it needs nobody any more


class NodeJob(msgspec.Struct):
    """The message of node 0 when every launcher has come."""

    starts: list[str]
    folder: str


class Nodes(StaticTCPRendezvous):
    """torchrun's static rendezvous, which also knows why a job over several nodes ends; `here` is this node's place."""

    # A thread of its own talks to the store and may wait for it for ever; the launcher's looks at what it has read.

    def __init__(self, here: NodeEnv, limit_s: float, join_s: float):
        super().__init__(
            here.master_addr, here.master_port, here.node_rank, here.nnodes, "umbra", timeout=math.ceil(limit_s)
        )
        self.here, self.limit_s, self.join_s = here, limit_s, join_s
        self.own = LauncherLine(secrets.token_hex(8), socket.gethostname())
        self.lines: list[LauncherLine] = []  # by node; this launcher's is among them, as it was last read
        self._heard: list[float] = []  # when each of them was last a new one
        self._job: NodeJob | None = None
        self._keys = [f"umbra/node{rank}" for rank in range(here.nnodes)]
        self._absent = "node 0" if here.node_rank else "others"
        self._broken: Exception | None = None  # what the thread that talks to the store failed with
        self._looked = self._lossy = 0.0  # when this launcher last looked, and first knew that a rank had lost another
        self._wake, self._said, self._gone = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def join(self, folder: str) -> str:
        """Waits for the launchers of all nodes. -> node 0's `folder`, on every node"""
        self._thread = threading.Thread(target=self._talk, args=(folder,), daemon=True)
        self._thread.start()
        try:
            return self._await_job()
        except BaseException:
            self._stop_talking()
            raise

    def _await_job(self) -> str:
        where = f"{self.here.master_addr}:{self.here.master_port}"
        start = time.monotonic()
        tell = start + TELL_S
        while not self._job:
            time.sleep(CHECK_S)
            now = time.monotonic()
            if self._broken:
                raise UserError(str(self._broken))
            if now - start > self.join_s:
                raise UserError(
                    f"{self._absent} of NNODES={self.here.nnodes} did not come to {where} within {self.join_s:g} s "
                    "(parallel_config.join_timeout_s): start all nodes with the same NNODES, MASTER_ADDR and "
                    "MASTER_PORT, and let this address be one that all of them reach"
                )
            if now > tell:
                print(
                    f"waiting for {self._absent} of NNODES={self.here.nnodes} at {where}", file=sys.stderr, flush=True
                )
                tell = now + TELL_AGAIN_S
        self._looked = time.monotonic()
        return self._job.folder

    def num_nodes_waiting(self) -> int:
        """Is asked by torchrun's agent while its ranks run."""
        if cause := self._reason():
            raise JobEnds(cause)
        return 0

    def end(self, cause: Cause | None) -> Cause | None:
        """Tells the others that this launcher ends, and for which `cause`; None: its ranks have succeeded.
        -> why the job ends, which another node may know better"""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it ends already
        if cause:
            self.own.cause = msgspec.structs.replace(cause, text=cause.text[:LONGEST])
            self._wake.set()
        while cause and cause.follows:
            if better := self._reason():
                cause = better
                break
            time.sleep(CHECK_S)
        cause = cause or self._known()
        self.own.cause, self.own.left = cause, True
        self._said.clear()
        self._wake.set()
        self._said.wait(BEAT_S)
        deadline = time.monotonic() + LINGER_S
        while self.here.node_rank == 0 and time.monotonic() < deadline and self._silent(LOSS_S) != self._staying():
            time.sleep(CHECK_S / 5)
        self._stop_talking()
        return cause

    def _stop_talking(self) -> None:
        """Ends the thread that talks to the store: one that returned from PyTorch's code while Python ends would abort
        the process. Where the store does not answer, the thread is left waiting for it."""
        self._gone.set()
        self._wake.set()
        if self._thread:
            self._thread.join(CONNECT_S + 2 * CHECK_S)

    def name(self, rank: int) -> str:
        return f"node {rank} ({self.lines[rank].host})"

    # What the launcher makes of the lines:

    def _reason(self) -> Cause | None:
        """Why the job ends; None: it goes on."""
        now = time.monotonic()
        pause, self._looked = now - self._looked, now
        if pause > LOSS_S / 2:  # this process was halted or had no processor: that says nothing of others
            self._heard = [heard + pause for heard in self._heard]
        if cause := self._known():
            return cause
        causes = [line.cause for line in (self.own, *self.lines) if line.cause]  # each follows from another one
        if causes:
            self._lossy = self._lossy or now
        if self._broken and not self.lines[0].left:
            return Cause(f"{self.name(0)} is gone: its launcher was killed, or the machine has ended")
        limit = min(LOSS_S, self.limit_s) if causes else self.limit_s
        own, silent = self.here.node_rank, self._silent(limit)
        if own and now - self._heard[own] > limit:  # the store does not answer: nothing is known of the others
            silent = [] if self.lines[0].left else [0]
        if silent:
            names = listed([self.name(rank) for rank in silent])
            return Cause(
                f"{names} {'has' if len(silent) == 1 else 'have'} not answered {self.name(own)} for {limit:g} s: "
                "dead, halted or cut off"
            )
        return causes[0] if causes and now - self._lossy > self.limit_s + LOSS_S else None

    def _known(self) -> Cause | None:
        """The reason that a launcher has told, if it is none that follows from another one."""
        return next((line.cause for line in self.lines if line.cause and not line.cause.follows), None)

    def _staying(self) -> list[int]:
        """The other nodes that have not left."""
        return [rank for rank, line in enumerate(self.lines) if rank != self.here.node_rank and not line.left]

    def _silent(self, limit_s: float) -> list[int]:
        """Returns the other nodes that have not been heard of for so long."""
        now = time.monotonic()
        return [rank for rank in self._staying() if now - self._heard[rank] > limit_s]

    # What talks to the store:

    def _talk(self, folder: str) -> None:
        try:
            store: TCPStore | None = None
            while not (store and self._job):
                if self._gone.is_set():
                    return
                try:
                    store = self._meet(folder)
                except DistError as error:
                    # Node 0 is not there yet, its name is unknown, or it has left an earlier job.
                    if "EADDRINUSE" in str(error):
                        raise UserError(f"MASTER_PORT={self.here.master_port} of this node is in use") from None
                    time.sleep(CHECK_S)
            store.set_timeout(timedelta(days=1))
            while not self._gone.is_set():
                self._beat(store, self._job)
                self._wake.wait(BEAT_S)
                self._wake.clear()
        except Exception as error:
            self._broken = error

    def _meet(self, folder: str) -> TCPStore | None:
        """Waits for a job that knows this start of this launcher: an earlier one may still be open. -> None: this
        launcher ends before."""
        here, own = self.here, self._keys[self.here.node_rank]
        store = TCPStore(
            here.master_addr,
            here.master_port,
            None,
            here.node_rank == 0,
            timedelta(seconds=CONNECT_S),
            multi_tenant=True,
            wait_for_workers=False,
        )
        store.set(own, msgspec.json.encode(self.own).decode())
        while not self._gone.is_set():
            absent = [str(rank) for rank, key in enumerate(self._keys) if not store.check([key])]
            self._absent = f"node {absent[0]}" if len(absent) == 1 else f"nodes {listed(absent)}"
            if here.node_rank == 0 and not absent:
                job = NodeJob([line.start for line in self._read(store)], folder)
                store.set(JOB, msgspec.json.encode(job).decode())
            if store.check([JOB]):
                job = msgspec.json.decode(store.get(JOB), type=NodeJob)
                if job.starts[here.node_rank] == self.own.start:
                    self.lines = self._read(store)
                    self._heard = [time.monotonic()] * here.nnodes
                    self._job = job
                    return store
                self._absent = "node 0, which has not left an earlier job yet,"
            time.sleep(CHECK_S)
        return None

    def _read(self, store: TCPStore) -> list[LauncherLine]:
        return [msgspec.json.decode(line, type=LauncherLine) for line in store.multi_get(self._keys)]

    def _beat(self, store: TCPStore, job: NodeJob) -> None:
        """Writes this launcher's line and reads all. A launcher that was started anew is not the one of this job."""
        self.own.beat += 1
        leaving = self.own.left
        store.set(self._keys[self.here.node_rank], msgspec.json.encode(self.own).decode())
        for rank, line in enumerate(self._read(store)):
            if line != self.lines[rank] and line.start == job.starts[rank]:
                self.lines[rank], self._heard[rank] = line, time.monotonic()
        if leaving:
            self._said.set()
