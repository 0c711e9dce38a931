"""Launchers of many nodes in one program: it imports torch once and forks one process into each node's namespaces.

A launcher here has ranks that sleep, and does what lines on its node's standard input say: `fail TEXT`, `follow TEXT`
(it has only lost another rank) or `leave`. Its output is in the file `output` of the node's folder.
"""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch.distributed  # noqa: F401 (so that no launcher has to)

from executor.config.env import node_env
from executor.launch.nodes import Cause, Nodes

LIBC = ctypes.CDLL(None, use_errno=True)
RANKS = 2  # of each node


def enter(process: int) -> None:
    """Makes this process, and with it what it forks, a part of the node whose first process is given."""
    names = [os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY) for name in ("net", "uts", "pid", "mnt")]
    for name in names:
        if LIBC.setns(name, 0):
            raise OSError(ctypes.get_errno(), "setns")


def launcher(rank: int, folder: Path, limit_s: float) -> None:
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["NODE_RANK"] = str(rank)
    nodes = Nodes(node_env(), limit_s, 60)
    print(nodes.join(f"folder of {nodes.own.host}"), flush=True)
    ranks = []
    for local in range(RANKS):
        place = os.environ | {"RANK": str(RANKS * rank + local)}
        ranks.append(subprocess.Popen(["sleep", "600"], env=place, start_new_session=True))
        threading.Thread(target=ranks[-1].wait, daemon=True).start()
    nodes.watch(lambda status: print("clean", status, flush=True))
    os.mkfifo(folder / "orders")
    with open(folder / "orders") as orders:
        order, _, text = orders.readline().strip().partition(" ")
    if order != "leave":
        nodes.fail(Cause(text, follows=order == "follow"))
    for process in ranks:
        process.kill()
        process.wait()
    nodes.leave()
    print("left", flush=True)
    os._exit(0)


def main() -> None:
    folder, limit_s, *firsts = sys.argv[1:]
    children = []
    for rank, first in enumerate(firsts):
        if not (child := os.fork()):
            enter(int(first))
            if inner := os.fork():  # the process whose PID namespace is the node's
                status = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
                os._exit(status if status >= 0 else 128 - status)
            launcher(rank, Path(folder) / f"results{rank}", float(limit_s))
        children.append(child)
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()
