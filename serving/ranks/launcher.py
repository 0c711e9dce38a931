"""The program that the front starts: it launches the ranks of a case that belong to this machine, as `umbra run` does,
with the server's worker as their program. On other nodes than the first there is no front: `umbra serve` starts the
same program there."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from umbra.base.errors import EXIT_STATUS
from umbra.base.files import WORK
from umbra.executor.config.case import Case
from umbra.executor.config.env import node_env
from umbra.executor.config.resolved import read_resolved, write_resolved
from umbra.executor.launch.launch import launch
from umbra.executor.launch.processes import end_with
from umbra.serving.ranks.processes import run_and_leave, signal_name

WORKER = ["-m", "umbra.serving.ranks.worker"]  # the program of each rank


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Starts the ranks of a server that belong to this node.")
    parser.add_argument("resolved", type=Path, help="the case, as the front has written it")
    parser.add_argument("--front", type=int, metavar="PID", help="the process that these ranks end with")
    args = parser.parse_args(argv)
    if args.front:
        end_with(args.front)
    launch(read_resolved(args.resolved), WORKER)  # returns when all ranks have left together
    if node_env().node_rank:
        print("the server has ended")


def launcher_of(case: Case, folder: Path) -> list[str]:
    """Writes the case into `folder`. -> the arguments of Python that run this program for it; its ranks end with this
    process"""
    path = folder / "case.json"
    write_resolved(case, path)
    return ["-m", "umbra.serving.ranks.launcher", str(path), f"--front={os.getpid()}"]


def keep_ranks(arguments: list[str], restarts: int) -> int:
    """On another node than the first: runs its launcher, which is Python with these `arguments`, and starts it again
    with those of all nodes, at most `restarts` times. -> the status that this process ends with"""
    asked: list[int] = []
    launcher: subprocess.Popen[bytes] | None = None

    def take(number: int, _: object) -> None:
        asked.append(number)
        if launcher:
            launcher.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, take)
    for start in range(restarts + 1):
        if start:
            print(f"starting this node's ranks again ({start} of {restarts})", flush=True)
        launcher = subprocess.Popen(
            [sys.executable, *arguments], cwd=WORK, stdin=subprocess.DEVNULL, start_new_session=True
        )
        status = launcher.wait()
        if status < 0 and not asked:
            name = signal_name(-status)
            print(f"error: the launcher (pid {launcher.pid}) failed: killed by {name}", file=sys.stderr, flush=True)
        # Wrong input would be refused again; from 128 on, somebody has asked a launcher to end.
        if status in (0, EXIT_STATUS) or status >= 128 or asked:
            break
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    run_and_leave(main)
