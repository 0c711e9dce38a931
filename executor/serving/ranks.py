"""The program that the front starts: it launches all ranks of a case, as `umbra run` does, with the server's worker as
their program. On other nodes than the first it is started by hand, since only rank 0 talks to the front."""

import argparse
import os

from executor.config.load import load_case
from executor.job.launch import launch
from executor.serving.processes import end_with, run_and_leave

WORKER = ["-m", "executor.serving.worker"]  # the program of each rank


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Starts the ranks of a server, or those of another node than its own.")
    parser.add_argument("case")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override keys")
    parser.add_argument("--front", type=int, metavar="PID", help="the process that these ranks end with")
    args = parser.parse_args(argv)
    if args.front:
        end_with(args.front)
    os.environ["CASE_NAME"] = args.case
    launch(load_case(args.case, args.set), [*WORKER, *(f"--set={pair}" for pair in args.set)])


if __name__ == "__main__":
    run_and_leave(main)
