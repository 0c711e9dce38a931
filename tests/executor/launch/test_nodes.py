"""The launchers of nodes in namespaces, with ranks that are shells: how they meet, notice that one is gone, and end."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.config.env import NodeEnv
from executor.launch.launch import interface_to
from executor.launch.nodes import Nodes
from tests.nodes import Cluster, cluster, parent, until
from tests.ranks import free_port
from umbra.errors import UserError
from umbra.files import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.beside]  # nodes wait for each other

LIMIT_S = 8.0


class Launchers:
    """The launchers of all nodes of `made`."""

    def __init__(self, made: Cluster, limit_s: float):
        self.made = made
        places = {name: value for name, value in made.nodes[0].environment().items() if name != "NODE_RANK"}
        firsts = [str(node.first) for node in made.nodes]
        places["TORCH_CPP_LOG_LEVEL"] = "FATAL"
        command = [
            sys.executable,
            "-m",
            "tests.executor.launch.node_launchers",
            str(made.folder),
            str(limit_s),
            *firsts,
        ]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | places, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        until(lambda: sum(len(node.ranks()) for node in made.nodes) == 2 * len(made.nodes))

    def order(self, node: int, text: str, *ranks: int) -> None:
        """Lets ranks of a node, all unless they are given, run `text` in their shells."""
        for rank in ranks or (2 * node, 2 * node + 1):
            (self.made.folder / f"results{node}/orders{rank}").write_text(f"{text}\n")

    def said(self, node: int) -> list[str]:
        return (self.made.folder / f"results{node}/output").read_text().splitlines()

    def end(self) -> list[int]:
        """Waits for the end of all launchers. -> their statuses"""
        out, errors = self.process.communicate(timeout=60)
        assert not errors
        for node in self.made.nodes:
            if node.holder.poll() is None:
                assert not node.processes()
        return [int(status) for status in out.split()]


@contextlib.contextmanager
def launched(folder: Path, count: int = 3, limit_s: float = LIMIT_S) -> Iterator[Launchers]:
    with cluster(count, folder) as made:
        launchers = Launchers(made, limit_s)
        try:
            assert [launchers.said(node.rank) for node in made.nodes] == [["folder of host-a"]] * count
            yield launchers
        finally:
            launchers.process.kill()


def lost(name: str, node: int) -> str:
    return rf"{name} has not answered node {node} \(.*\) for 8 s: dead, halted or cut off"


@pytest.mark.parametrize("fault", ["dies", "is cut off", "is halted"])
def test_a_node_that_is_gone_is_named_on_all_others(tmp_path: Path, fault: str) -> None:
    """Its own launcher, where it still runs, names the other side."""
    with launched(tmp_path) as launchers:
        gone = launchers.made.nodes[2]
        launcher = parent(max(gone.ranks().values()))
        if fault == "dies":
            gone.die()
        elif fault == "is cut off":
            gone.cut()
        else:
            os.kill(launcher, signal.SIGSTOP)
            until(lambda: all(len(launchers.said(rank)) == 2 for rank in (0, 1)))
            os.kill(launcher, signal.SIGCONT)
        assert launchers.end() == [1, 1, 137 if fault == "dies" else 1]
        name = r"node 2 \(host-c\)"
        for rank in (0, 1):
            assert any(re.fullmatch(lost(name, other), launchers.said(rank)[-1]) for other in (0, 1))
        if fault == "is cut off":
            assert re.fullmatch(lost(r"node 0 \(host-a\)", 2), launchers.said(2)[-1])


def test_when_node_0_dies_the_others_end_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, limit_s=600) as launchers:
        launchers.made.nodes[0].die()
        assert launchers.end() == [137, 1, 1]
        for rank in (1, 2):
            assert launchers.said(rank)[-1].startswith("node 0 (host-a) is gone: ")


def test_every_node_says_the_cause_and_not_what_follows_from_it(tmp_path: Path) -> None:
    """Node 1 has lost a rank of another node; node 2 knows why, and says so later."""
    with launched(tmp_path, limit_s=600) as launchers:
        launchers.order(1, "kill -ABRT $$", 2)
        time.sleep(3)
        assert launchers.process.poll() is None
        launchers.order(2, "exit 3", 4)
        assert launchers.end() == [1, 1, 1]
        (line,) = {launchers.said(rank)[-1] for rank in range(3)}
        assert re.match(r"rank 4 \(pid \d+\) on node 2 \(host-c\) failed: exit status 3; logs on each node: ", line)


def test_a_job_succeeds_on_all_nodes_though_one_takes_longer(tmp_path: Path) -> None:
    with launched(tmp_path, 2) as launchers:
        launchers.order(0, "exit 0")
        time.sleep(2)
        launchers.order(1, "exit 0")
        assert launchers.end() == [0, 0]
        assert [launchers.said(rank)[-1] for rank in (0, 1)] == ["left"] * 2


def test_a_node_that_does_not_come_is_named() -> None:
    port = free_port()
    with pytest.raises(UserError, match=rf"node 1 of NNODES=2 did not come to 127.0.0.1:{port} within 2 s"):
        Nodes(NodeEnv(2, 0, "127.0.0.1", port), 15, 2).join("folder")


def test_the_interface_of_an_address() -> None:
    assert interface_to("127.0.0.1", 29500) == "lo"
    assert interface_to("no such host", 29500) == ""


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^MASTER_PORT={port} of this node is in use$"):
            Nodes(NodeEnv(2, 0, "127.0.0.1", port), 15, 30).join("folder")
