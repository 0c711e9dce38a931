"""Starts a case's ranks and reports why a job failed.

A case of one rank replaces this process. For more, torchrun's engine starts the ranks, watches them, and ends all of
them when one fails. On several nodes, each launcher gets the same NNODES, MASTER_ADDR and MASTER_PORT and a NODE_RANK
of its own.
"""

import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor.config.case import Case
from executor.config.env import NodeEnv, node_env
from executor.config.load import load_case, load_model_config
from executor.config.platforms import PLATFORMS
from executor.launch.halts import Halts
from executor.launch.nodes import Cause, Nodes, interface_to
from executor.launch.platform_settings import platform_settings
from executor.launch.preflight import check_ready
from executor.launch.results import create_results, discard_results, share_results
from executor.platform import start_environment
from umbra.errors import EXIT_STATUS, UserError
from umbra.files import ROOT

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

END_S = 5  # seconds that ranks have to end before they are killed
CLEAN_S = 2.0  # longest that a launcher tries to remove what it has written
HCCL = re.compile(r"ERR02\d{3} DIST")  # torch_npu's errors of collectives, whose reason may be on another node


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
    here = node_env()
    if case.world_size % here.nnodes:
        raise UserError(f"NNODES={here.nnodes} does not divide world_size: {case.world_size} of case {case.name}")
    os.environ.update(start_environment(case.platform, platform_settings(case), os.environ))
    if case.world_size == 1:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *program])
    with tempfile.TemporaryDirectory(prefix="umbra_") as words:  # where ranks leave the reasons of their failures
        _launch_ranks(case, program, here, words)


def _launch_ranks(case: Case, program: list[str], here: NodeEnv, words: str) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank sets its own threads; this silences torchrun's warning
    given = "TORCH_CPP_LOG_LEVEL" in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a lost connection is reported once, below
    if here.nnodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        where = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]  # a free port
    else:
        # By itself gloo takes the address of this machine's name, which may be unknown, or one of the loopback.
        if interface := interface_to(here.master_addr, here.master_port):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        where = [f"--nnodes={here.nnodes}", f"--node-rank={here.node_rank}"]
        where += [f"--master-addr={here.master_addr}", f"--master-port={here.master_port}"]

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    if not given and not PLATFORMS[case.platform].is_host:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # warnings of ranks matter there, such as that an op falls back
    logging.disable(logging.ERROR)  # torchrun's own messages; a failure is reported once, below
    results, nodes = _meet(case, here, words) if here.nnodes > 1 else (create_results(case.name), None)
    ranks = [*where, f"--nproc-per-node={case.world_size // here.nnodes}", "--max-restarts=0", f"--log-dir={words}"]
    ranks += [f"--shutdown-timeout={END_S}", *program, "--results", str(results)]
    config, command, arguments = config_from_args(get_args_parser().parse_args(ranks))
    halts = Halts()
    try:
        with halts:
            elastic_launch(config, command)(*arguments)
    except ChildFailedError as error:
        cause = _cause(error, results, nodes, halts.reasons)
    except SignalException as error:
        who = nodes.name(here.node_rank) if nodes else "this job"
        cause = Cause(f"{who} was told to end by {error.sigval.name}", 128 + error.sigval)
    except DistError as error:
        cause = Cause(f"{config.rdzv_endpoint}: {error}", follows=True)
    else:
        if nodes:
            nodes.leave()
        return
    if nodes:
        nodes.fail(cause)
    if cause.status < 128:
        print(f"error: {cause.text}", file=sys.stderr)
    if cause.status == EXIT_STATUS:
        discard_results(results)
    sys.exit(cause.status)


def _meet(case: Case, here: NodeEnv, words: str) -> tuple[Path, Nodes]:
    """Joins the launchers of the other nodes. -> the folder of results, of the same name on every node"""
    limits = case.parallel_config
    nodes = Nodes(here, limits.node_timeout_s, limits.join_timeout_s)
    results = create_results(case.name) if here.node_rank == 0 else None
    # The first process of a container ignores a signal without a handler; torchrun's own follow.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        name = nodes.join(results.name if results else "")
    except BaseException:
        if results:
            discard_results(results)
        raise
    folder = results or share_results(case.name, name)

    def clean(status: int) -> None:
        until = time.monotonic() + CLEAN_S
        while Path(words).exists() and time.monotonic() < until:  # what torchrun still writes there keeps it from going
            shutil.rmtree(words, ignore_errors=True)
        if status == EXIT_STATUS:
            discard_results(folder)

    nodes.watch(clean)
    return folder, nodes


def _cause(error: "ChildFailedError", results: Path, nodes: Nodes | None, known: Mapping[int, str]) -> Cause:
    """Why the job ended, as far as this node knows; the stack of an exception is printed here. `known` has reasons by
    process id."""
    rank, failure = _first_failure(error)
    message, stack, follows = _words(failure.error_file_data)
    if failure.exitcode == EXIT_STATUS and message:
        return Cause(str(UserError(message)), EXIT_STATUS)
    how = f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
    how = known.get(failure.pid, how)
    follows = follows or (failure.pid not in known and failure.exitcode in (-signal.SIGABRT, -signal.SIGTERM))
    if cause := stack.splitlines()[-1] if stack else message:
        if stack:  # a bug; what the system refused says nothing of the code
            print(stack, file=sys.stderr)
        follows = follows or bool(HCCL.search(stack))
        how += f": {UserError(cause)!s:.300}"
    who = f"rank {rank} (pid {failure.pid})" + (f" on {nodes.name(nodes.here.node_rank)}" if nodes else "")
    logs = "logs on each node" if nodes else "all ranks' logs"
    return Cause(f"{who} failed: {how}; {logs}: {results}", follows=follows)


def _words(data: Any) -> tuple[str, str, bool]:
    """The message and the stack that a rank has left, as _leave_word of rank.py writes them, and whether it failed only
    because another one was gone; empty if it has left none."""
    record = data.get("message") if isinstance(data, dict) else None
    message = record.get("message") if isinstance(record, dict) else None
    extra = record.get("extraInfo") if isinstance(record, dict) else None
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    follows = isinstance(extra, dict) and extra.get("follows") is True
    return message if isinstance(message, str) else "", stack.strip() if isinstance(stack, str) else "", follows


def _first_failure(error: "ChildFailedError") -> "tuple[int, ProcessFailure]":
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
