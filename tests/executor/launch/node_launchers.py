"""Launchers of many nodes in one program: it imports torch once and forks one process into each node's namespaces.

A rank here waits for a line from the pipe `orders<rank>` in its node's folder and runs it in a shell. What a launcher
says is in the file `output` there.
"""

import ctypes
import logging
import os
import sys
import tempfile
from pathlib import Path

import torch.distributed  # noqa: F401 (so that no launcher has to)

from executor.config.env import node_env
from executor.launch.launch import run_ranks
from executor.launch.nodes import Nodes

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
    logging.disable(logging.ERROR)
    nodes = Nodes(node_env(), limit_s, 60)
    print(nodes.join(f"folder of {nodes.own.host}"), flush=True)
    for local in range(RANKS):
        os.mkfifo(folder / f"orders{RANKS * rank + local}")
    with tempfile.TemporaryDirectory() as words:
        cause = run_ranks(["sh", "-c", f"read order <{folder}/orders$RANK; eval $order"], RANKS, words, folder, nodes)
    print(cause.text if cause else "left", flush=True)
    os._exit(cause.status if cause else 0)


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
