"""Whole jobs over nodes in namespaces, as users start them: no host name is known, and each has its own results."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import Cluster, Job, Node, cluster, parent, until
from tests.ranks import free_port
from tests.tiny import save_tiny, write_case
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.executor.config.env import NodeEnv
from umbra.executor.launch.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.beside]

# As demo_tp8: attention by tensors, experts by tensors and whole.
SPLIT = {"attn_tp_size": 4, "moe_tp_size": 2, "embed_tp_size": 4, "lmhead_tp_size": 4}
ENDLESS = 8000


def write_job(folder: Path, name: str, ranks: int, tokens: int, **parallel: Any) -> str:
    """A case of a tiny model with the tokenizer of the demo."""
    model = folder / "model"
    save_tiny(model, vocab_size=4096, num_key_value_heads=8, max_position_embeddings=2 * ENDLESS)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).write_bytes((ROOT / "checkpoints/austen_moe" / file).read_bytes())
    data = {"prompts": ["x"], "input_max_len": 48, "max_new_tokens": tokens, "batch_size": 1, "warm_up": False}
    path = write_case(
        folder / f"{name}.yaml",
        model,
        world_size=ranks,
        threads=1,
        data_config=data,
        parallel_config=parallel,
        sampling_config={"ignore_eos": True},
    )
    return str(path)


def started(machines: Cluster, *command: str) -> list[Job]:
    return [node.start("bash", *command) for node in machines.nodes]


def decoding(machines: Cluster, case: str, ranks: int) -> None:
    """Waits until all ranks have loaded and some steps must have run."""
    until(lambda: sum(node.logs(case).count("model ready") for node in machines.nodes) == ranks)
    time.sleep(2)


@pytest.mark.thorough
def test_a_job_answers_and_every_node_says_why_it_ended(tmp_path: Path) -> None:
    """Folders of results have one name on all nodes. Then, in jobs that would take minutes, a rank is killed; one of
    the launchers; and node 0."""
    case = write_job(tmp_path, "short", 4, 3, **SPLIT)
    with cluster(2, tmp_path) as machines:
        jobs = started(machines, "infer.sh", case)
        assert [job.end() for job in jobs] == [0, 0], [job.output for job in jobs]
        assert "4 rank(s)" in jobs[0].output
        assert "rank(s)" not in jobs[1].output
        folders = [next((node.results / "short").iterdir()) for node in machines.nodes]
        assert folders[0].name == folders[1].name
        files = [sorted(path.name for path in folder.iterdir()) for folder in folders]
        first = ["case.json", "rank0.log", "rank1.log", "report.json"]
        assert files == [first, ["case1.json", "rank2.log", "rank3.log"]]

        killed = endless(tmp_path, machines, "rank")
        os.kill(machines.nodes[1].ranks()[1], signal.SIGKILL)
        assert [job.end() for job in killed] == [1, 1]
        (line,) = {line for job in killed for line in job.said()}
        assert re.match(r"error: rank 1 \(pid \d+\) on node 1 \(host-b\) failed: killed by SIGKILL; logs on each", line)

        jobs, node = endless(tmp_path, machines, "launcher"), machines.nodes[1]
        os.kill(parent(max(node.ranks().values())), signal.SIGKILL)
        assert jobs[0].end() == 1
        (line,) = jobs[0].said()
        assert re.fullmatch(r"error: node 1 \(host-b\) has not answered node 0 \(host-a\) for (5|15) s: .*", line)
        until(lambda: not node.processes())
        assert not machines.nodes[0].processes()

        jobs = endless(tmp_path, machines, "first")
        machines.nodes[0].die()
        assert jobs[1].end() == 1
        assert jobs[1].said()[0].startswith("error: node 0 (host-a) is gone: ")


def endless(folder: Path, machines: Cluster, name: str) -> list[Job]:
    """A job that decodes on both nodes."""
    jobs = started(machines, "infer.sh", write_job(folder, name, 2, ENDLESS))
    decoding(machines, name, 2)
    return jobs


@pytest.mark.thorough
def test_a_server_goes_on_when_a_node_is_replaced_and_ends_when_it_is_cut_off(tmp_path: Path) -> None:
    case = write_job(tmp_path, "served", 2, 8, node_timeout_s=8, join_timeout_s=60)
    with cluster(2, tmp_path) as machines:
        front, other = started(machines, "serve.sh", case, "--restarts", "1")

        def ready() -> int:
            return front.output.count("\nready: ")

        until(ready)
        whole = ask(machines.nodes[0], "/v1/completions", prompt=[1, 2, 3], max_tokens=5, ignore_eos=True)
        assert whole["usage"]["completion_tokens"] == 5
        machines.nodes[1].die()
        lost = "node 1 (host-b) has not answered node 0 (host-a) for 5 s: dead, halted or cut off"
        until(lambda: f"{lost}; starting the ranks again (1 of 1)" in front.output)
        assert ask(machines.nodes[0], "/health/ready")["reason"] == lost
        assert other.process.wait()
        other = machines.replace(1).start("bash", "serve.sh", case)
        until(lambda: ready() == 2)
        again = ask(machines.nodes[0], "/v1/completions", prompt=[1, 2, 3], max_tokens=5, ignore_eos=True)
        assert again["choices"] == whole["choices"]
        machines.nodes[1].cut()
        assert (front.end(), other.end()) == (1, 1)
        assert front.said() == [f"error: {lost.replace('5 s', '8 s')}"]
        assert other.said() == [
            "error: node 0 (host-a) has not answered node 1 (host-b) for 8 s: dead, halted or cut off"
        ]
        assert not any(node.processes() for node in machines.nodes)


def ask(node: Node, path: str, **body: Any) -> Any:
    """Sends a request from within the node; a GET without a body."""
    code = "import json, sys, urllib.request as r; u, b = sys.argv[1:]\n"
    code += "try: f = r.urlopen(r.Request(u, b.encode() or None), timeout=60)\nexcept r.HTTPError as e: f = e\n"
    code += "print(f.read().decode())"
    command = node.inside(sys.executable, "-c", code, f"http://127.0.0.1:8000{path}", json.dumps(body) if body else "")
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_node_that_does_not_come_is_named() -> None:
    """No thread is left that would talk to the store while Python ends, which would abort the process."""
    port, before = free_port(), threading.active_count()
    with pytest.raises(UserError, match=rf"node 1 of NNODES=2 did not come to 127.0.0.1:{port} within 2 s"):
        Nodes(NodeEnv(2, 0, "127.0.0.1", port), 15, 2).join("folder")
    assert threading.active_count() == before


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^MASTER_PORT={port} of this node is in use$"):
            Nodes(NodeEnv(2, 0, "127.0.0.1", port), 15, 30).join("folder")
