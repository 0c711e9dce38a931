"""The launchers of a job on several nodes: they meet, notice when one of them is slow or gone, and end for one reason.

Node 0 has a store, torchrun's own at MASTER_ADDR:MASTER_PORT. Every launcher keeps one line about itself there, writes
it anew each second, and reads the lines of all. A node whose line stays as it is for `node_timeout_s` is lost: it died,
or its link is cut, of which TCP itself says nothing for a quarter of an hour. A launcher that sees a reason to end
kills its ranks, whatever they wait for, and prints the reason. Nothing here depends on the device or its collectives.
"""

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import msgspec

from executor.config.env import NodeEnv
from executor.launch.processes import is_halted, ranks_below
from umbra.errors import UserError, listed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT_S = 1.0  # seconds between two looks at all lines
CHECK_S = 0.25
SLOW_S = 5.0  # seconds of silence after which a node is called slow
SLOW_TRIP_S = 0.05  # a node is also slow if each of its messages to node 0 and back takes longer
TRIPS = 10  # messages of which the fastest counts: the others may have waited for a processor
LOSS_S = 5.0  # seconds of silence that suffice once a rank has lost its connection to another one
LINGER_S = 5.0  # seconds that node 0 keeps the store open, so that others can read why the job ends
CONNECT_S = 5  # of one attempt to reach the store
TELL_S, TELL_AGAIN_S = 10.0, 60.0  # when a launcher says that it waits for others
LONGEST = 2000  # characters of a reason
SIOCGIFADDR = 0x8915
JOB = "umbra/job"
FAST = "it is fast again"


class Cause(msgspec.Struct, frozen=True):
    """Why a launcher ends the job."""

    text: str
    status: int = 1
    follows: bool = False  # its ranks have lost others; whether that is the reason, other nodes know


class Line(msgspec.Struct):
    """What a launcher says about itself."""

    start: str  # another one at each start of a launcher
    host: str
    beat: int = 0
    trip_s: float = 0.0  # seconds of a message to the store and back, the fastest of the last ones
    halted: list[str] = []  # its ranks that a signal has halted
    cause: Cause | None = None
    left: bool = False  # it needs nobody any more


class Job(msgspec.Struct):
    """What node 0 says when every launcher has come."""

    starts: list[str]
    folder: str


@dataclass
class Other:
    """What this launcher knows of one."""

    line: Line
    changed: float  # when its line was last a new one
    told: set[str] = field(default_factory=set)  # in what way it is slow, as a person has been told


class Nodes:
    """This launcher among those of all nodes; `here` is its place."""

    # One thread talks to the store and may wait for it for ever; another one judges what is known and ends the process.

    def __init__(self, here: NodeEnv, limit_s: float, join_s: float):
        self.here, self.limit_s, self.join_s = here, limit_s, join_s
        self.own = Line(secrets.token_hex(8), socket.gethostname())
        self.job: Job | None = None
        self.others: list[Other] = []  # by node; this launcher is among them
        self._keys = [f"umbra/node{rank}" for rank in range(here.nnodes)]
        self._absent = "node 0" if here.node_rank else "others"
        self._answered = 0.0  # when the store last answered
        self._broken: Exception | None = None  # what the thread that talks to the store failed with
        self._trips: list[float] = []  # seconds of the last messages to the store and back
        self._lossy = 0.0  # when a rank was first known to have lost another one
        self._wake, self._said, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._ending = threading.Lock()

    def join(self, folder: str) -> str:
        """Waits for the launchers of all nodes. -> node 0's `folder`, on every node"""
        where = f"{self.here.master_addr}:{self.here.master_port}"
        start = time.monotonic()
        tell = start + TELL_S
        threading.Thread(target=self._talk, args=(folder,), daemon=True).start()
        while not self.job:
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
                self._tell(f"waiting for {self._absent} of NNODES={self.here.nnodes} at {where}")
                tell = now + TELL_AGAIN_S
        return self.job.folder

    def watch(self, cleanup: Callable[[int], None]) -> None:
        """From now on this process ends as soon as there is a reason, after a call of `cleanup` with its status."""
        threading.Thread(target=self._judge, args=(cleanup,), daemon=True).start()

    def fail(self, cause: Cause) -> NoReturn:
        """Tells all nodes why this one ends. This process then ends, for this reason or for a better one."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it ends already
        with self._ending:  # never again once the judge ends this process
            self.own.cause = msgspec.structs.replace(cause, text=cause.text[:LONGEST])
        self._wake.set()
        threading.Event().wait()
        raise AssertionError

    def leave(self) -> None:
        """Is called when the job has succeeded here; from now on this launcher is not missed."""
        self._part()
        self._stop.set()

    def name(self, rank: int) -> str:
        return f"node {rank} ({self.others[rank].line.host})"

    def _part(self) -> None:
        """Says that this launcher leaves. Node 0 waits until the others have read why."""
        deadline = time.monotonic() + LINGER_S
        self.own.left = True
        self._said.clear()
        self._wake.set()
        self._said.wait(BEAT_S)
        while self.here.node_rank == 0 and time.monotonic() < deadline:
            known = self._known()
            if all(other.line.left or time.monotonic() - other.changed > LOSS_S for other in known.values()):
                return
            time.sleep(CHECK_S / 5)

    def _known(self) -> dict[int, Other]:
        """The other launchers."""
        return {rank: other for rank, other in enumerate(self.others) if rank != self.here.node_rank}

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):  # who reads may have gone
            print(text, file=sys.stderr, flush=True)

    # What talks to the store:

    def _talk(self, folder: str) -> None:
        from torch.distributed import DistError

        try:
            while not self.job:
                try:
                    store = self._meet(folder)
                except (
                    DistError
                ) as error:  # node 0 is not there yet, its name is unknown, or it has left an earlier job
                    if "EADDRINUSE" in str(error):
                        raise UserError(f"MASTER_PORT={self.here.master_port} of this node is in use") from None
                    time.sleep(CHECK_S)
            store.set_timeout(timedelta(days=1))  # the judge knows better
            while not self._stop.is_set():
                self._beat(store)
                self._wake.wait(BEAT_S)
                self._wake.clear()
        except Exception as error:
            self._broken = error

    def _meet(self, folder: str) -> "Store":
        """Waits for a job that knows this start of this launcher: an earlier one may still be open."""
        from torch._C._distributed_c10d import TCPStore

        here, own = self.here, self._keys[self.here.node_rank]
        store: Store = TCPStore(
            here.master_addr, here.master_port, None, here.node_rank == 0, timedelta(seconds=CONNECT_S),
            multi_tenant=True, wait_for_workers=False,
        )  # fmt: skip
        store.set(own, msgspec.json.encode(self.own).decode())
        while True:
            absent = [str(rank) for rank, key in enumerate(self._keys) if not store.check([key])]
            self._absent = f"node {absent[0]}" if len(absent) == 1 else f"nodes {listed(absent)}"
            if here.node_rank == 0 and not absent:
                job = Job([line.start for line in self._lines(store)], folder)
                store.set(JOB, msgspec.json.encode(job).decode())
            if store.check([JOB]):
                job = msgspec.json.decode(store.get(JOB), type=Job)
                if job.starts[here.node_rank] == self.own.start:
                    self._answered = time.monotonic()
                    self.others = [Other(line, self._answered) for line in self._lines(store)]
                    self.job = job
                    return store
                self._absent = "node 0, which has not left an earlier job yet,"
            time.sleep(CHECK_S)

    def _lines(self, store: "Store") -> list[Line]:
        return [msgspec.json.decode(line, type=Line) for line in store.multi_get(self._keys)]

    def _beat(self, store: "Store") -> None:
        """Writes this launcher's line and reads all."""
        trips = self._trips
        self.own.beat += 1
        leaving = self.own.left
        store.set(self._keys[self.here.node_rank], msgspec.json.encode(self.own).decode())
        start = time.monotonic()
        store.check([JOB])
        trips.append(time.monotonic() - start)
        del trips[:-TRIPS]
        self.own.trip_s = min(trips) if len(trips) == TRIPS else 0.0
        lines = self._lines(store)
        self._answered = time.monotonic()
        for other, line in zip(self.others, lines, strict=True):
            if line != other.line:
                other.line, other.changed = line, self._answered
        if leaving:
            self._said.set()

    # What judges:

    def _judge(self, cleanup: Callable[[int], None]) -> None:
        if not (cause := self._first_cause()):
            return
        self._ending.acquire()
        try:
            self._stop_ranks()
            self._tell(f"error: {cause.text}")
            self.own.cause = cause
            cleanup(cause.status)
            self._part()
        finally:
            os._exit(cause.status)

    def _first_cause(self) -> Cause | None:
        """Waits for a reason to end. None: the job has succeeded."""
        before = time.monotonic()
        while not self._stop.wait(CHECK_S):
            if self.own.left:  # node 0 may go before this node has read that it has left as well
                return None
            now = time.monotonic()
            if now - before > LOSS_S / 2:  # this process was halted or had no processor: that says nothing of others
                self._answered += now - before
                for other in self.others:
                    other.changed += now - before
            before = now
            self.own.halted = [f"rank {rank} (pid {pid})" for rank, pid in ranks_below().items() if is_halted(pid)]
            for rank, other in enumerate(self.others):
                self._tell_slow(rank, other, now)
            if cause := self._cause(now):
                return cause
        return None

    def _cause(self, now: float) -> Cause | None:
        """Why the job ends; None: it goes on."""
        own, known = self.here.node_rank, self._known()
        causes = [line.cause for line in (self.own, *(other.line for other in known.values())) if line.cause]
        for cause in causes:
            if not cause.follows:
                return cause
        if causes:
            self._lossy = self._lossy or now
        first_left = self.others[0].line.left
        if self._broken and not first_left:
            return Cause(f"{self.name(0)} is gone: its launcher was killed, or the machine has ended")
        limit = min(LOSS_S, self.limit_s) if causes else self.limit_s
        for rank, other in known.items():
            if self.job and other.line.start != self.job.starts[rank]:
                return Cause(f"{self.name(rank)} has been started anew: the ranks that it had are gone")
        silent = [rank for rank, other in known.items() if now - other.changed > limit and not other.line.left]
        if own and now - self._answered > limit:
            silent = [] if first_left else [0]  # nothing is known of the others
        if silent:
            names = listed([self.name(rank) for rank in silent])
            return Cause(
                f"{names} {'has' if len(silent) == 1 else 'have'} not answered {self.name(own)} for {limit:g} s: "
                "dead, halted or cut off"
            )
        if causes and now - self._lossy > self.limit_s + LOSS_S:
            return causes[0]
        return None

    def _tell_slow(self, rank: int, other: Other, now: float) -> None:
        """Says once for each way in which a node is slow, and when it no longer is."""
        answered = self._answered if rank == 0 and self.here.node_rank else other.changed
        trip = other.line.trip_s
        ways = {f"{who} goes on": f"{who} is halted by a signal, and the job waits for it" for who in other.line.halted}
        if rank != self.here.node_rank and now - answered > SLOW_S and not other.line.left:
            ways["it answers again"] = f"slow, no answer for {SLOW_S:g} s; the job ends after {self.limit_s:g} s"
        if trip > SLOW_TRIP_S / (2 if FAST in other.told else 1):  # no more lines when it is near the limit
            ways[FAST] = f"slow, a message to node 0 and back takes {1000 * trip:.0f} ms or longer"
        for way in ways.keys() - other.told:
            self._tell(f"{self.name(rank)}: {ways[way]}")
        for way in other.told - ways.keys():
            self._tell(f"{self.name(rank)}: {way}")
        other.told = set(ways)

    def _stop_ranks(self) -> None:
        """Kills the ranks and what they have started, and returns when none runs."""
        while running := ranks_below():
            for pid in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            time.sleep(0.01)


def interface_to(address: str, port: int) -> str:
    """The network interface of this machine over which `address` is reached, or which has it; empty: unknown."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            own = probe.getsockname()[0]
        if family == socket.AF_INET6:
            wanted = socket.inet_pton(family, own.partition("%")[0]).hex()
            with open("/proc/net/if_inet6") as table:
                return next((line.split()[5] for line in table if line.startswith(wanted)), "")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                    if socket.inet_ntoa(found[20:24]) == own:
                        return name
    except OSError:
        pass
    return ""
