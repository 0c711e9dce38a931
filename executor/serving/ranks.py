"""The program that the front starts: it launches the ranks of a case that belong to this machine, as `umbra run` does,
with the server's worker as their program. On other nodes than the first there is no front: `umbra serve` does the same
there."""

import argparse
import os

from executor.config.env import node_env
from executor.config.load import load_case
from executor.job.launch import launch
from executor.serving.processes import end_with, run_and_leave

WORKER = ["-m", "executor.serving.worker"]  # the program of each rank


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Starts the ranks of a server that belong to this node.")
    parser.add_argument("case")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override keys")
    parser.add_argument("--front", type=int, metavar="PID", help="the process that these ranks end with")
    args = parser.parse_args(argv)
    if args.front:
        end_with(args.front)
    start_ranks(args.case, args.set)


def start_ranks(case_name: str, overrides: list[str]) -> None:
    """Returns when all ranks have left together; if they have failed, the process ends with a line that says why."""
    os.environ["CASE_NAME"] = case_name
    launch(load_case(case_name, overrides), [*WORKER, *(f"--set={pair}" for pair in overrides)])
    if node_env().node_rank:
        print("the server has ended")


if __name__ == "__main__":
    run_and_leave(main)
