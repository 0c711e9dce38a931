"""Nodes on this machine: network, process, mount and hostname namespaces on a bridge, with results of their own.

Each node has a first process that everything on it ends with, as everything on a machine ends with its power, and a
link that can be cut. Nothing of this exists outside the namespaces, so nothing is left behind.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from umbra.base.files import ROOT

NAMESPACES = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
PORT = 29500
HOLD = "import signal, sys; print('ready', flush=True); sys.stdin.close(); signal.pause()"
Found = TypeVar("Found")


@dataclass
class Node:
    rank: int
    cluster: "Cluster"
    holder: "subprocess.Popen[str]"  # its child is the first process of the node
    results: Path
    jobs: "list[Job]" = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"host-{'abcd'[self.rank]}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.rank + 1}"

    @property
    def first(self) -> int:
        """The process id, seen from here, of the node's first process."""
        return int(Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()[0])

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", "--target", str(self.first), "--net", "--uts", "--mount", "--pid", *command]

    def environment(self) -> dict[str, str]:
        """A job's place, as torchrun's variables have it."""
        where = {"MASTER_ADDR": self.cluster.nodes[0].address, "MASTER_PORT": str(PORT)}
        return where | {"NNODES": str(len(self.cluster.nodes)), "NODE_RANK": str(self.rank)}

    def start(self, *command: str) -> "Job":
        """Starts `command` in the project's root as this node's part of a job."""
        output = self.results / f"output{len(self.jobs)}"
        with open(output, "w") as file:
            process = subprocess.Popen(
                self.inside("env", f"--chdir={ROOT}", *command),
                env=os.environ | self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.jobs.append(Job(process, output))
        return self.jobs[-1]

    def processes(self) -> dict[int, dict[str, str]]:
        """The environment of every process on this node but its first, by process id as seen from here."""
        environments, own = {}, os.readlink(f"/proc/{self.first}/ns/pid")
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != self.first and os.readlink(entry / "ns/pid") == own:
                    pairs = [p.split("=", 1) for p in (entry / "environ").read_bytes().decode().split("\0") if "=" in p]
                    environments[int(entry.name)] = dict(pairs)
        return environments

    def ranks(self) -> dict[int, int]:
        """The process id, seen from here, of each rank that runs on this node."""
        return {int(environment["RANK"]): pid for pid, environment in self.processes().items() if "RANK" in environment}

    def logs(self, case: str) -> str:
        """Returns the logs that this node's ranks of a case have written."""
        return "".join(path.read_text() for path in self.results.glob(f"{case}/*/rank*.log"))

    def cut(self) -> None:
        """Packets to and from this node are lost from now on. No connection is reset, and the link seems to be up."""
        self.cluster.switch("ip", "link", "set", f"port{self.rank}", "nomaster")

    def die(self) -> None:
        """Ends every process of the node and its link at once."""
        os.kill(self.first, signal.SIGKILL)
        self.holder.wait()


@dataclass
class Job:
    process: "subprocess.Popen[bytes]"
    path: Path

    @property
    def output(self) -> str:
        return self.path.read_text()

    def said(self, start: str = "error: ") -> list[str]:
        """Its lines that begin like this."""
        return [line for line in self.output.splitlines() if line.startswith(start)]

    def end(self, within_s: float = 300.0) -> int:
        """Waits for its end. -> its status"""
        return self.process.wait(within_s)


@dataclass
class Cluster:
    folder: Path
    stack: contextlib.ExitStack
    bridge: int  # a process in the network namespace of the bridge
    nodes: list[Node] = field(default_factory=list)

    def switch(self, *command: str) -> None:
        run("nsenter", "--target", str(self.bridge), "--net", *command)

    def new_node(self, rank: int) -> Node:
        results = self.folder / f"results{rank}"
        results.mkdir(exist_ok=True)
        node = Node(rank, self, hold(self.stack, NAMESPACES), results)
        port = f"port{rank}"
        self.switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(node.first))
        self.switch("ip", "link", "set", port, "master", "bridge", "up")
        shell = f"""set -e
            hostname {node.host}
            ip link set lo up
            ip link set eth0 up
            ip addr add {node.address}/24 dev eth0
            mount --bind {results} {ROOT}/results"""
        run(*node.inside("sh", "-c", shell))
        return node

    def replace(self, rank: int) -> Node:
        """A new node in the place of one that has died."""
        self.nodes[rank] = self.new_node(rank)
        return self.nodes[rank]


@contextlib.contextmanager
def cluster(count: int, folder: Path) -> Iterator[Cluster]:
    """`count` nodes, whose results are below `folder`; skips the test where this is not permitted."""
    (ROOT / "results").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            machines = Cluster(folder, stack, hold(stack, ["unshare", "--net"]).pid)
            machines.switch("ip", "link", "add", "bridge", "type", "bridge")
            machines.switch("ip", "link", "set", "bridge", "up")
            machines.nodes += [machines.new_node(rank) for rank in range(count)]
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"nodes in namespaces are not permitted here: {getattr(error, 'stderr', '') or error}".strip())
        yield machines


def hold(stack: contextlib.ExitStack, namespaces: list[str]) -> "subprocess.Popen[str]":
    """A process in new namespaces, which ends with `stack`."""
    command, pipe = [*namespaces, sys.executable, "-Sc", HOLD], subprocess.PIPE
    holder = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
    stack.callback(holder.kill)
    assert holder.stdout
    assert holder.stderr
    if holder.stdout.readline() != "ready\n":
        raise OSError(holder.stderr.read())
    return holder


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def until(condition: Callable[[], Found], within_s: float = 300.0) -> Found:
    """Waits until `condition` holds. -> what it found"""
    deadline = time.monotonic() + within_s
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return result


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
