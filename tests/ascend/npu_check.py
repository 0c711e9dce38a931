"""The processes of tools/npu_check in tests: forked from one that has imported what they need, with a device that
computes (computing.py), small sizes, and one fault at a time."""

import multiprocessing
import multiprocessing.process
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch_npu

import tests.ascend.ranks  # noqa: F401 (says what the processes are forked from has imported)
from tests.ascend.extension import load_extension
from umbra.ops.ascend import vector_core
from umbra.tools.npu_check import environment, numbers, processes

NEW = 1 << 62  # a time of building after every source


@dataclass
class Forked:
    """Implements tools.npu_check.processes.Process."""

    process: multiprocessing.process.BaseProcess

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def poll(self) -> int | None:
        return self.process.exitcode


def forked(case: Path, fault: str) -> Callable[..., Forked]:
    """Takes the place of `processes.start`. `case` is the demo's, `fault` a function of this module or empty."""

    def start(arguments: list[str], environment: dict[str, str], log: Path, group: bool) -> Forked:
        process = multiprocessing.get_context("forkserver").Process(
            target=become, args=(arguments, environment, str(log), 0 if group else os.getpgrp(), case, fault)
        )
        process.start()
        return Forked(process)

    return start


def become(arguments: list[str], variables: dict[str, str], log: str, group: int, case: Path, fault: str) -> None:
    """This process is one of the tool's from here on."""
    os.setpgid(0, group)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = sys.stderr = os.fdopen(out, "w", buffering=1)
    os.environ.clear()
    os.environ.update(variables)
    os.environ.pop("CPU_AFFINITY_CONF", None)  # it needs a library of the driver
    torch.set_num_threads(1)
    from tests.ascend import computing
    from umbra.tools.npu_check.__main__ import main

    put(processes, start=forked(case, fault))
    small(str(case))
    computing.start()
    if fault:
        FAULTS[fault]()
    main(arguments)


def small(case: str) -> None:
    """Replaces the sizes of real models, before the modules of the stages are imported. `case` takes the demo's
    place."""
    environment.CASE = case
    torch_npu.npu.device_count = lambda: 2
    size = numbers.Size("30B", 256, 96, 8, 4, 1, 128, 2)
    put(numbers, EIGHTH=size, WHOLE=size, SIZES=(numbers.SMALL, size))
    put(vector_core, built=lambda *_: NEW, load=lambda *_: load_extension())
    from umbra.tools.npu_check.stages import bridge, collectives, graphs, kernels, model, operators, overlap, shadows

    operators.ROUNDS = kernels.ROUNDS = graphs.ROUNDS = collectives.ROUNDS = overlap.ROUNDS = 1
    put(kernels, LAYERS=2, READ_BYTES=1 << 16, BATCHES=(1, 8))
    graphs.LAUNCHES, graphs.COPIED = 4, 1 << 16
    put(collectives, BYTES=(256, 4096), LOOPS=2)
    put(overlap, LOOPS=2, COUNT=64)
    model.STEPS, model.WIDE, shadows.SLOTS = 3, 2, 3
    bridge.LIMIT_S, bridge.LATE_S = 2.0, 0.1


def put(module: object, **values: object) -> None:
    for name, value in values.items():
        setattr(module, name, value)


def keep(module: Any, *names: str) -> None:
    """Only these cases of a stage."""
    every = module.checks
    module.checks = lambda logs: [check for check in every(logs) if check.name in names]


def refused_operator() -> None:
    """Groups that are one too few: a rule of CANN's sources that the fake CANN enforces."""
    from umbra.tools.npu_check.stages import operators

    keep(operators, "moe fusion_v2, tiled bfloat16, small", "moe fusion_v2, tiled bfloat16, 30B")
    real = torch_npu.npu_grouped_matmul
    torch_npu.npu_grouped_matmul = lambda **given: real(**{**given, "group_list": given["group_list"][1:]})


def broken_device() -> None:
    """A kernel that accesses what it must not, after which the process cannot use the device."""
    from umbra.tools.npu_check.stages import operators

    def raises(size: Any) -> Any:
        raise RuntimeError("The Inner error is reported\nACL stream synchronize failed, error code is 507015")

    operators.OPERATORS["rms_norm"] = raises
    keep(operators, "rms_norm, small", "argmax, small", "rms_norm, 30B", "argmax, 30B")


def stale_replay() -> None:
    from tests.ascend import computing
    from umbra.tools.npu_check.stages import graphs

    computing.Computing.flush = lambda self: self.pending.clear()  # type: ignore[method-assign]
    keep(graphs, "captured graph")


def killed_rank() -> None:
    from umbra.tools.npu_check.stages import collectives

    def body(**given: Any) -> Any:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        time.sleep(60)

    put(collectives, rank_body=body)
    keep(collectives, "2 ranks")


def lost_shadows() -> None:
    """Makes `join` leave out the CPU's sums."""
    from tests.ascend import computing
    from umbra.tools.npu_check.stages import shadows

    computing.SPECIAL["shadow_join"] = lambda work: computing.put(work.outs[0], computing.on_cpu(work.args[1]))
    keep(shadows, "eager")


FAULTS = {f.__name__: f for f in (refused_operator, broken_device, stale_replay, killed_rank, lost_shadows)}
