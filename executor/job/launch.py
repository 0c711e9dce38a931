"""Starts a case's ranks and reports why a job failed.

A case of one rank replaces this process. For more, torchrun's engine starts the ranks, watches them, and ends all of
them when one fails. On several nodes, each launcher gets the same NNODES, MASTER_ADDR and MASTER_PORT and a NODE_RANK
of its own.
"""

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from errors import EXIT_STATUS, UserError
from executor.config.case import Case
from executor.config.env import node_env
from executor.config.load import load_case, load_model_config
from executor.config.platforms import PLATFORMS
from executor.engine.settings import platform_settings
from executor.job.preflight import check_ready
from executor.job.results import create_results, discard_results
from executor.platform import start_environment
from files import ROOT

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def run_case(name: str, overrides: list[str]) -> None:
    """Check the case `name` with its `overrides`, then generate with it on all its ranks."""
    case = load_case(name, overrides)
    load_model_config(case)  # refuse before a single rank is started
    check_ready(case)
    os.environ["CASE_NAME"] = name
    launch(case, [str(ROOT / "run.py"), *(f"--set={pair}" for pair in overrides)])


def launch(case: Case, program: list[str]) -> None:
    """Run `program`, a script or `-m` and a module with their arguments, as every rank of `case`.

    Returns only when all ranks have succeeded; otherwise this process ends with the job's exit status.
    """
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
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank sets its own threads; this silences torchrun's warning
    if PLATFORMS[case.platform].is_host:  # on Ascend, warnings of native code matter, such as that an op falls back
        # A lost connection to another rank also raises an exception, which is reported once.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
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

    logging.disable(logging.ERROR)  # torchrun's own messages; a failure is reported once, below
    results = create_results(case.name)
    with tempfile.TemporaryDirectory(prefix="umbra_") as words:  # where ranks leave the reasons of their failures
        ranks = [*where, f"--nproc-per-node={local}", "--max-restarts=0", f"--log-dir={words}"]
        ranks += [*program, "--results", str(results)]
        config, command, arguments = config_from_args(get_args_parser().parse_args(ranks))
        try:
            elastic_launch(config, command)(*arguments)
        except ChildFailedError as error:
            status = _report(error, results)
            if status == EXIT_STATUS:
                discard_results(results)
            sys.exit(status)
        except SignalException as error:
            sys.exit(128 + error.sigval)
        except DistError as error:
            discard_results(results)
            raise UserError(f"the nodes did not find each other at {config.rdzv_endpoint}: {error}") from None


def _report(error: "ChildFailedError", results: Path) -> int:
    """Print why the job ended; return its exit status."""
    rank, failure = _cause(error)
    record = failure.error_file_data.get("message", {})
    if failure.exitcode == EXIT_STATUS and record:
        print(f"error: {record['message']}", file=sys.stderr)
        return EXIT_STATUS
    how = f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
    if "extraInfo" in record:
        stack = record["extraInfo"]["py_callstack"].strip()
        cause = stack.splitlines()[-1]
        if not cause.startswith("ConnectionError: "):  # that another rank is gone says nothing of the code
            print(stack, file=sys.stderr)
        how += f": {UserError(cause.removeprefix('ConnectionError: '))!s:.300}"
    print(f"error: rank {rank} (pid {failure.pid}) failed: {how}; all ranks' logs: {results}", file=sys.stderr)
    return 1


def _cause(error: "ChildFailedError") -> "tuple[int, ProcessFailure]":
    """The rank whose failure ended the job, and that failure; the other ranks failed because of it.

    A rank that died without writing an error (killed, out of memory, crashed in native code) comes first, then the
    rank that wrote its error earliest. A rank writes its error before its connections close, so the modification times
    of the error files are in the order of cause and effect. The timestamps inside them are whole seconds, which is too
    coarse. Ranks that gloo aborted because another rank was gone, and ranks that were stopped after the failure, come
    last.
    """

    def order(item: "tuple[int, ProcessFailure]") -> tuple[int, float]:
        failure = item[1]
        if Path(failure.error_file).is_file():
            return 1, os.stat(failure.error_file).st_mtime_ns
        wake = {-signal.SIGABRT: 2, -signal.SIGTERM: 3}
        return wake.get(failure.exitcode, 0), failure.timestamp

    return min(error.failures.items(), key=order)
