"""Runs a function on several ranks, each with a process and a fake device of its own.

def body(rank: int, size: int) -> list[str]:       # a module's own function, so that the child can import it
    join_hccl({"hccl_buffer_size": 400})
    with device_log() as log:
        dist.all_reduce(torch.ones(size).npu())
    return log.lines

first, second = run_ranks(body, 2, 16)

Importing torch_npu, torchair and transformers takes seconds, so ranks are forked from a server process that has
imported them. That process has used no device and compiled nothing. Its environment, stdout and stderr are those of its
start, which is at the first use.
"""

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch_npu

from tests.ranks import free_port
from umbra.executor.config.env import RankEnv

multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        "tests.conftest",
        "pytest",
        "torch_npu",
        "umbra.executor.platform.ascend.device",
        "umbra.executor.platform.ascend.graphs",
        "tests.ascend.engine",
        "tests.ascend.ge",
        "tests.ascend.log",
    ]
)


def run_ranks(body: Callable[..., Any], ranks: int, *args: Any, limit_s: float = 400, fresh: bool = False) -> list[Any]:
    """Runs body(rank, *args) on each rank, with torchrun's environment and the device set, and returns the results. A
    rank that raises, dies or is late fails the test with its traceback, and the others are killed. `fresh` ranks have
    the environment, stdout and stderr of now, and import everything themselves."""
    start = multiprocessing.get_context("spawn" if fresh else "forkserver")
    port = free_port()
    children, receivers = [], []
    results: dict[int, Any] = {}
    deadline = time.monotonic() + limit_s
    try:
        for rank in range(ranks):
            receiver, sender = start.Pipe()
            child = start.Process(target=run_rank, args=(sender, body, rank, ranks, port, args))
            child.start()
            sender.close()  # or its end of file would never be seen here
            children.append(child)
            receivers.append(receiver)
        while len(results) < ranks:
            late = [rank for rank in range(ranks) if rank not in results]
            ready = wait([receivers[rank] for rank in late], max(0, deadline - time.monotonic()))
            assert ready, f"ranks {late} did not finish in {limit_s:g} s"
            for rank in late:
                if receivers[rank] in ready:
                    results[rank] = receive(rank, receivers[rank], children[rank])
        for receiver in receivers:
            receiver.send(None)
        for rank, child in enumerate(children):
            child.join(max(0, deadline - time.monotonic()))
            assert child.exitcode == 0, f"rank {rank} finished and then left with status {child.exitcode}"
    finally:
        for child in children:
            child.kill()
            child.join()
    return [results[rank] for rank in range(ranks)]


def run_gloo_ranks(body: Callable[..., None], ranks: int, *args: Any) -> None:
    """Calls body(rank, port, *args) on each rank, without a device; a rank that raises fails the test."""
    arguments = body, free_port(), args
    start_processes: Any = torch.multiprocessing.start_processes
    start_processes(run_gloo_rank, arguments, nprocs=ranks, start_method="forkserver")


def run_gloo_rank(rank: int, body: Callable[..., None], port: int, args: Any) -> None:
    gc.freeze()  # a rank neither looks through what it shares nor copies its pages
    body(rank, port, *args)


def gloo_ranks(rank: int, port: int, ranks: int) -> RankEnv:
    """Returns what a body of `run_gloo_ranks` gives to a runner, whose process group then forms."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    return RankEnv(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, error_file="")


def receive(rank: int, receiver: Connection, child: multiprocessing.process.BaseProcess) -> Any:
    try:
        failure, result = receiver.recv()
    except EOFError:
        child.join()
        raise AssertionError(f"rank {rank} died with status {child.exitcode}") from None
    assert failure is None, f"rank {rank} failed:\n{failure}"
    return result


def run_rank(sender: Connection, body: Callable[..., Any], rank: int, ranks: int, port: int, args: Any) -> None:
    gc.freeze()  # as above
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    try:
        torch.npu.set_device(rank)
        sender.send((None, body(rank, *args)))
        sender.recv()  # all are done: rank 0 keeps the store through which the others make their communicators
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        sender.send((traceback.format_exc(), None))
    sender.close()


def join_hccl(config: dict[str, Any] | None = None) -> None:
    """The default process group over hccl, with torch_npu's `hccl_config`."""
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = config or {}
    dist.init_process_group("hccl", pg_options=options)
