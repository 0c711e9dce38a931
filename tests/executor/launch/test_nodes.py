"""The launchers of four nodes in namespaces, with ranks that sleep: how nodes meet, are told to be slow, and end."""

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
import torch.distributed  # noqa: F401 (so that no wait within a test is for it)

from executor.config.env import NodeEnv
from executor.launch.nodes import Job, Line, Nodes, Other, interface_to
from tests.nodes import Cluster, cluster, until
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
        until(lambda: all((made.folder / f"results{node.rank}/orders").exists() for node in made.nodes))

    def order(self, rank: int, text: str) -> None:
        (self.made.folder / f"results{rank}/orders").write_text(f"{text}\n")

    def said(self, rank: int) -> list[str]:
        return (self.made.folder / f"results{rank}/output").read_text().splitlines()

    def end(self) -> list[int]:
        """Waits for the end of all launchers. -> their statuses"""
        out, errors = self.process.communicate(timeout=60)
        assert not errors
        for node in self.made.nodes:
            if node.holder.poll() is None:
                assert not node.processes()
        return [int(status) for status in out.split()]


@contextlib.contextmanager
def launched(folder: Path, count: int = 4, limit_s: float = LIMIT_S) -> Iterator[Launchers]:
    with cluster(count, folder) as made:
        launchers = Launchers(made, limit_s)
        try:
            for node in made.nodes:
                assert launchers.said(node.rank) == ["folder of host-a"]
                assert len(node.ranks()) == 2
            yield launchers
        finally:
            launchers.process.kill()


def test_a_node_that_dies_is_named_on_all_others(tmp_path: Path) -> None:
    with launched(tmp_path) as launchers:
        launchers.made.nodes[2].die()
        assert launchers.end() == [1, 1, 137, 1]
        for rank in (0, 1, 3):
            *_, reason, cleaned = launchers.said(rank)
            lost = r"error: node 2 \(host-c\) has not answered node [013] \(.*\) for 8 s: dead, halted or cut off"
            assert re.fullmatch(lost, reason)
            assert cleaned == "clean 1"


def test_both_sides_of_a_cut_link_name_the_other_one(tmp_path: Path) -> None:
    with launched(tmp_path) as launchers:
        launchers.made.nodes[2].cut()
        assert launchers.end() == [1, 1, 1, 1]
        for rank, lost in enumerate(["node 2 (host-c)", "node 2 (host-c)", "node 0 (host-a)", "node 2 (host-c)"]):
            assert launchers.said(rank)[-2].startswith(f"error: {lost} has not answered ")


def test_when_node_0_dies_the_others_end_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, 3, limit_s=600) as launchers:
        launchers.made.nodes[0].die()
        assert launchers.end() == [137, 1, 1]
        for rank in (1, 2):
            assert launchers.said(rank)[-2].startswith("error: node 0 (host-a) is gone: ")


def test_every_node_says_the_cause_and_not_what_follows_from_it(tmp_path: Path) -> None:
    """Node 1 has lost a rank; node 2 knows why, and says so later."""
    with launched(tmp_path, 3, limit_s=600) as launchers:
        launchers.order(1, "follow a connection is lost")
        time.sleep(3)
        assert launchers.process.poll() is None
        launchers.order(2, "fail the cup is empty")
        assert launchers.end() == [1, 1, 1]
        assert {launchers.said(rank)[-2] for rank in range(3)} == {"error: the cup is empty"}


def test_who_is_slow_is_told_and_does_not_end_the_job(tmp_path: Path) -> None:
    with launched(tmp_path, 2, limit_s=600) as launchers:
        _, slow = launchers.made.nodes
        rank, victim = max(slow.ranks().items())

        def told(text: str, *on: int) -> None:
            for node in on:
                until(lambda node=node: any(re.fullmatch(text, line) for line in launchers.said(node)))  # type: ignore[misc]

        os.kill(victim, signal.SIGSTOP)
        told(rf"node 1 \(host-b\): rank {rank} \(pid \d+\) is halted by a signal, and the job waits for it", 0, 1)
        os.kill(victim, signal.SIGCONT)
        told(rf"node 1 \(host-b\): rank {rank} \(pid \d+\) goes on", 0, 1)
        slow.cut()
        told(r"node 1 \(host-b\): slow, no answer for 5 s; the job ends after 600 s", 0)
        told(r"node 0 \(host-a\): slow, no answer for 5 s; the job ends after 600 s", 1)
        slow.restore()
        told(r"node 1 \(host-b\): it answers again", 0)
        told(r"node 0 \(host-a\): it answers again", 1)
        for node in (0, 1):
            launchers.order(node, "leave")
        assert launchers.end() == [0, 0]
        assert not any(line.startswith("error") for node in (0, 1) for line in launchers.said(node))


def test_a_node_that_does_not_come_is_named(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.launch.nodes.TELL_S", 3)
    port = free_port()
    with pytest.raises(UserError, match=rf"node 1 of NNODES=2 did not come to 127.0.0.1:{port} within 4 s"):
        Nodes(NodeEnv(2, 0, "127.0.0.1", port), 15, 4).join("folder")
    assert f"waiting for node 1 of NNODES=2 at 127.0.0.1:{port}" in capfd.readouterr().err


def test_the_interface_of_an_address() -> None:
    assert interface_to("127.0.0.1", 29500) == "lo"
    assert interface_to("no such host", 29500) == ""


def test_a_node_that_is_far_away_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes(NodeEnv(2, 0, "", 0), LIMIT_S, 1)
    near, far = (Other(Line("", f"host-{name}", trip_s=trip), 100.0) for name, trip in (("a", 0.001), ("b", 0.2)))
    nodes.others = [near, far]
    for _ in range(2):
        nodes._tell_slow(0, near, 101.0)
        nodes._tell_slow(1, far, 101.0)
    far.line.trip_s = 0.001
    nodes._tell_slow(1, far, 102.0)
    assert capfd.readouterr().err.splitlines() == [
        "node 1 (host-b): slow, a message to node 0 and back takes 200 ms or longer",
        "node 1 (host-b): it is fast again",
    ]


def test_time_in_which_nothing_ran_here_is_no_silence_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is halted for longer than the limit: when it goes on, the others have a chance to be heard."""
    nodes = Nodes(NodeEnv(2, 0, "", 0), LIMIT_S, 1)
    nodes.job = Job(["", ""], "")
    nodes.others = [Other(Line("", "host-a"), 0.0), Other(Line("", "host-b"), 0.0)]
    times = iter([0.0, 0.25, 20.0, 20.25])
    monkeypatch.setattr("executor.launch.nodes.time.monotonic", lambda: next(times))
    checks = iter([False, False, False, True])
    monkeypatch.setattr(nodes._stop, "wait", lambda _: next(checks))
    assert nodes._first_cause() is None
    assert nodes.others[1].changed == 19.75


def test_a_store_that_goes_while_this_node_leaves_is_no_cause() -> None:
    nodes = Nodes(NodeEnv(2, 1, "", 0), LIMIT_S, 1)
    nodes.others = [Other(Line("", "host-a"), 0.0), Other(Line("", "host-b"), 0.0)]
    nodes._broken = ConnectionError("lost")
    cause = nodes._first_cause()
    assert cause
    assert cause.text.startswith("node 0 (host-a) is gone: ")
    nodes.own.left = True
    assert nodes._first_cause() is None


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^MASTER_PORT={port} of this node is in use$"):
            Nodes(NodeEnv(2, 0, "127.0.0.1", port), 15, 30).join("folder")
