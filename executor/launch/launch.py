"""Starts a case's ranks and reports why a job failed.

A case of one rank replaces this process. For more, torchrun's engine starts the ranks, watches them, and ends all of
them when one fails. On several nodes, each launcher gets the same NNODES, MASTER_ADDR and MASTER_PORT and a NODE_RANK
of its own.
"""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from umbra.base.errors import EXIT_STATUS, UserError
from umbra.executor.config.case import Case
from umbra.executor.config.env import NodeEnv, node_env, rank_env
from umbra.executor.config.load import load_model_config
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.resolved import write_resolved
from umbra.executor.launch.causes import Cause, cause_of
from umbra.executor.launch.halts import Halts
from umbra.executor.launch.preflight import check_prompts, check_ready
from umbra.executor.launch.results import create_results, discard_results, share_results
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.plan.resolve import resolve
from umbra.executor.platform.registry import start_environment

if TYPE_CHECKING:
    from umbra.executor.launch.nodes import Nodes

END_S = 5  # seconds that ranks have to end before they are killed
SIOCGIFADDR = 0x8915
PROGRAM = "umbra.executor.rank_program"  # of each rank


def run_case(case: Case) -> None:
    """Check the case, then generate with it on all its ranks."""
    check_prompts(case)
    load_model_config(case)  # refuse before a single rank is started
    check_ready(case)
    launch(case, ["-m", PROGRAM])


def launch(case: Case, program: list[str]) -> None:
    """Run `program`, a script or `-m` and a module with their arguments, as every rank of `case`. Ranks get two more
    arguments: `--results FOLDER`, new for this run, and `--resolved FILE`, the case, written once by each launcher.

    Returns only when all ranks have succeeded; otherwise this process ends with the job's exit status.
    """
    here = node_env()
    case = resolve(case, silent=here.node_rank > 0)
    if case.world_size % here.nnodes:
        raise UserError(f"NNODES={here.nnodes} does not divide world_size: {case.world_size} of case {case.name}")
    os.environ.update(start_environment(case.platform, platform_settings(case), os.environ))
    if case.world_size == 1:
        rank_env()  # refused before there is a folder
        results = create_results(case.name)
        try:
            command = [sys.executable, *program, *_given(case, here, results)]
        except UserError:
            discard_results(results)
            raise
        sys.stdout.flush()
        os.execv(sys.executable, command)
    with tempfile.TemporaryDirectory(prefix="umbra_") as words:  # where ranks leave the reasons of their failures
        _launch_ranks(case, program, here, words)


def _given(case: Case, here: NodeEnv, results: Path) -> list[str]:
    """The arguments that ranks get from this launcher, whose case is written into `results`. Launchers of several nodes
    may have one file system and settings of their own, so each has a file of its own."""
    path = results / (f"case{here.node_rank}.json" if here.node_rank else "case.json")
    write_resolved(case, path)
    return ["--results", str(results), "--resolved", str(path)]


def _launch_ranks(case: Case, program: list[str], here: NodeEnv, words: str) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank sets its own threads
    given = "TORCH_CPP_LOG_LEVEL" in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a lost connection is reported once, below
    # By itself gloo takes the address of this machine's name, which may be unknown, or one of the loopback.
    interface = "lo" if here.nnodes == 1 else interface_to(here.master_addr, here.master_port)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    import torch.distributed  # noqa: F401 (which reads the level of its log now)

    if not given and PLATFORMS[case.platform].plugin:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # warnings of ranks matter there, such as that an op falls back
    logging.disable(logging.ERROR)  # torchrun's own messages; a failure is reported once, below
    results, nodes = _meet(case, here) if here.nnodes > 1 else (create_results(case.name), None)
    try:
        command = [sys.executable, "-u", *program, *_given(case, here, results)]
    except UserError as error:
        cause: Cause | None = Cause(str(error), EXIT_STATUS)
        cause = nodes.end(cause) if nodes else cause
    else:
        cause = run_ranks(command, case.world_size // here.nnodes, words, results, nodes)
    if not cause:
        return
    if nodes or cause.status < 128:
        with contextlib.suppress(OSError):  # who reads may have gone
            print(f"error: {cause.text}", file=sys.stderr, flush=True)
    if cause.status == EXIT_STATUS:
        discard_results(results)
    sys.exit(cause.status)


def _meet(case: Case, here: NodeEnv) -> "tuple[Path, Nodes]":
    """Joins the launchers of the other nodes. -> the folder of results, of the same name on every node"""
    from umbra.executor.launch.nodes import Nodes

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
    return results or share_results(case.name, name), nodes


def run_ranks(
    command: list[str], count: int, words: str, results: Path, nodes: "Nodes | None" = None, halts: Halts | None = None
) -> Cause | None:
    """Runs `command` as each of this node's `count` ranks to their end, with torchrun's agent. -> why the job failed"""
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from umbra.executor.launch.nodes import JobEnds

    free_port = RendezvousParameters("c10d", "127.0.0.1:0", "umbra", 1, 1)
    rendezvous = nodes or get_rendezvous_handler(free_port)
    spec = WorkerSpec("rank", count, rendezvous, entrypoint=command[0], args=tuple(command[1:]), max_restarts=0)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=words), exit_barrier_timeout=END_S, shutdown_timeout=END_S)
    who = nodes.name(nodes.here.node_rank) if nodes else ""
    cause, halts = None, halts or Halts()
    try:
        with halts:
            result = agent.run()
        if result.is_failed():
            cause = cause_of(result.failures, results, halts.reasons, who)
    except JobEnds as error:
        cause = error.cause
    except SignalException as error:
        cause = Cause(f"{who or 'this job'} was told to end by {error.sigval.name}", 128 + error.sigval)
    except DistError as error:
        cause = Cause(f"the launchers' store: {error}", follows=True)
    finally:
        rendezvous.shutdown()  # ends its thread, which could otherwise be the one that collects it, and join itself
    return nodes.end(cause) if nodes else cause


def interface_to(address: str, port: int) -> str:
    """The network interface of this machine over which `address` is reached, or which has it; empty: unknown."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            own = probe.getsockname()[0]
        if family == socket.AF_INET6:
            wanted = socket.inet_pton(family, own.partition("%")[0]).hex()
            with open("/proc/net/if_inet6") as table:
                return next((line.split()[5] for line in table if line.startswith(wanted)), "")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                    if socket.inet_ntoa(answer[20:24]) == own:
                        return name
    except OSError:
        pass
    return ""
