"""Runs one case on all its ranks: `bash infer.sh [CASE] [--set section.key=value ...]`.

One rank: this process becomes it. More: torchrun's engine starts them, watches them, and ends all when one fails.
For several nodes, give each the same NNODES, MASTER_ADDR and MASTER_PORT and its own NODE_RANK.
"""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from errors import EXIT_STATUS, UserError, run_main
from executor.config.case import Case
from executor.config.env import node_env
from executor.config.load import list_cases, load_case, load_model_config
from executor.engine.settings import platform_settings
from executor.job.preflight import check_ready
from executor.job.results import create_results, discard_results
from executor.platform import start_environment
from executor.platform.ascend.compile_cache import clear_cache
from files import ROOT

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bash infer.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="?", default="demo", help="a name in yaml_configs/, or a path ending in .yaml")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override keys (docs/config.md)"
    )
    parser.add_argument("--list", action="store_true", help="show the cases")
    parser.add_argument("--clear-cache", action="store_true", help="remove the case's compiled graphs and stop")
    parser.add_argument("--plan", action="store_true", help="count memory, with shadow experts predict times, and stop")
    args = parser.parse_args(argv)
    if args.list:
        cases = list_cases()
        for name, description in cases:
            print(f"{name:<{max(len(n) for n, _ in cases)}}  {description}")
        return
    case = load_case(args.case, args.set)
    if args.clear_cache:
        print(f"{clear_cache(case.name)} compiled graphs of case {case.name} removed")
        return
    load_model_config(case)  # refuse before a single rank is started
    if args.plan:
        from executor.planning.report import show_plan

        return show_plan(case)
    check_ready(case)
    os.environ["CASE_NAME"] = args.case
    overrides = ["--set", *args.set] if args.set else []
    launch(case, [str(ROOT / "run.py"), *overrides])


def launch(case: Case, program: list[str]) -> None:
    """Run the Python `program` as every rank of `case`; returns only when all have succeeded."""
    os.environ.update(start_environment(case.platform, platform_settings(case), os.environ))
    if case.world_size == 1:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *program])
    _launch_ranks(case, program)


def _launch_ranks(case: Case, program: list[str]) -> None:
    nodes = node_env()
    if case.world_size % nodes.nnodes:
        raise UserError(f"NNODES={nodes.nnodes} does not divide world_size: {case.world_size} of case {case.name}")
    local = case.world_size // nodes.nnodes
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # run.py sets each rank's threads; this stills torchrun's warning
    if case.platform == "cpu":  # elsewhere warnings of native code matter, such as of an op that falls back
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a lost partner raises too, and is told from there, once
    if nodes.nnodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        where = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]  # a free port
    else:
        where = [f"--nnodes={nodes.nnodes}", f"--node-rank={nodes.node_rank}"]
        where += [f"--master-addr={nodes.master_addr}", f"--master-port={nodes.master_port}"]

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    logging.disable(logging.ERROR)  # of torchrun in this process; what happened is told below, once
    results = create_results(case.name)
    ranks = [*where, f"--nproc-per-node={local}", "--max-restarts=0", *program, "--results", str(results)]
    config, command, arguments = config_from_args(get_args_parser().parse_args(ranks))
    try:
        elastic_launch(config, command)(*arguments)
    except ChildFailedError as error:
        status = _tell(error, results)
        if status == EXIT_STATUS:
            discard_results(results)
        sys.exit(status)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except DistError as error:
        discard_results(results)
        raise UserError(f"the nodes did not find each other at {config.rdzv_endpoint}: {error}") from None


def _tell(error: "ChildFailedError", results: Path) -> int:
    """Print why the job ended; returns its exit status."""
    rank, failure = _cause(error)
    record = failure.error_file_data.get("message", {})
    if failure.exitcode == EXIT_STATUS and record:
        print(f"error: {record['message']}", file=sys.stderr)
        return EXIT_STATUS
    if "extraInfo" in record:
        print(record["extraInfo"]["py_callstack"], file=sys.stderr)
    how = f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
    print(f"error: rank {rank} (pid {failure.pid}) failed: {how}; all ranks' logs: {results}", file=sys.stderr)
    return 1


def _cause(error: "ChildFailedError") -> "tuple[int, ProcessFailure]":
    """The failure that started it; the others broke down in its wake, when their collectives lost a partner.

    A rank that died without a word (killed, out of memory, crashed in native code) comes first. Else the earliest
    word: a rank writes its error before its connections close, so the times of the error files are in the order of
    cause and effect, where the timestamps inside them, in whole seconds, are not. Last come ranks that gloo aborted,
    which it does when a partner is gone, and those that were stopped because of the failure.
    """

    def order(item: "tuple[int, ProcessFailure]") -> tuple[int, float]:
        failure = item[1]
        if Path(failure.error_file).is_file():
            return 1, os.stat(failure.error_file).st_mtime_ns
        wake = {-signal.SIGABRT: 2, -signal.SIGTERM: 3}
        return wake.get(failure.exitcode, 0), failure.timestamp

    return min(error.failures.items(), key=order)


if __name__ == "__main__":
    run_main(main)
