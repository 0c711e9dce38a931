"""The ranks of a job: started as a user's are or, where that is not what is tested, forked from one process that has
imported torch."""

import functools
import gc
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

from umbra.base.errors import collect_seldom
from umbra.base.files import ROOT


def run_ranks(
    folder: Path, world_size: int, program: list[str], limit_s: float = 300
) -> "subprocess.CompletedProcess[str]":
    """Runs `program`, a script with its arguments, as all ranks of a job with logs in `folder`. A rank that fails ends
    the others."""
    command = [sys.executable, "-m", "tests.ranks", str(folder), str(world_size), *program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)


def launch_ranks(case: str, overrides: list[str], program: list[str]) -> "subprocess.CompletedProcess[str]":
    """Runs `program` as all ranks of `case`, started and watched as a user's are."""
    start = f"""
from umbra.base.errors import run_main
from umbra.executor.config.load import load_case
from umbra.executor.launch.launch import launch
run_main(lambda argv: launch(load_case({case!r}, {overrides!r}), {program!r}))
"""
    return subprocess.run(
        [sys.executable, "-c", start],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def join_once() -> None:
    """Lets this rank's cases join once, and groups of the same ranks be made once: 16 ranks have 120 connections in
    each."""
    from torch import distributed

    distributed.init_process_group("gloo")
    distributed.init_process_group = lambda *_, **__: None
    new_group = distributed.new_group
    group_of = functools.cache(lambda *ids: new_group(list(ids)))
    distributed.new_group = lambda ids, **_: group_of(*ids)


def run_rank(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    collect_seldom()
    from torch.multiprocessing.spawn import start_processes

    import umbra.commands.logits
    import umbra.serving.ranks.worker  # noqa: F401 (so that no rank has to)

    _, folder, world_size, *program = sys.argv
    sys.argv = [*program, "--results", folder]
    os.environ |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    gc.freeze()  # ranks neither look through what they share nor copy its pages
    start_processes(run_rank, nprocs=int(world_size), start_method="fork")


if __name__ == "__main__":
    main()
