"""The program that the front starts: it launches all ranks of a case, as `umbra run` does, with the server's worker as
their program."""

import argparse
import os

from errors import run_main
from executor.config.load import load_case
from executor.job.launch import launch


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Starts the ranks of a server; the front calls this.")
    parser.add_argument("case")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override keys")
    args = parser.parse_args(argv)
    os.environ["CASE_NAME"] = args.case
    launch(load_case(args.case, args.set), ["-m", "executor.serving.worker", *(f"--set={pair}" for pair in args.set)])


if __name__ == "__main__":
    run_main(main)
