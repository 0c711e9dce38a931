"""What the processes of tools/npu_check have in tests: small sizes, and one fault at a time."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch_npu

from ops.ascend import vector_core
from tests.ascend.extension import load_extension
from tools.npu_check import environment, numbers

NEW = 1 << 62  # a time of building after every source


def small(case: str) -> None:
    """Replaces the sizes of real models, before the modules of the stages are imported. `case` takes the demo's
    place."""
    environment.CASE = case
    torch_npu.npu.device_count = lambda: 2
    size = numbers.Size("30B", 256, 96, 8, 4, 1, 128, 2)
    put(numbers, EIGHTH=size, WHOLE=size, SIZES=(numbers.SMALL, size))
    put(vector_core, built=lambda *_: NEW, load=lambda *_: load_extension())
    from tools.npu_check.stages import bridge, collectives, graphs, kernels, model, operators, overlap, shadows

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


def spoil(op: str, where: Callable[[], bool] = lambda: True) -> None:
    """The op's first result is wrong."""
    from tests.ascend import computing

    def wrong(work: Any) -> None:
        values = computing.tree_leaves(work.compute())
        computing.put(work.outs[0], values[0] * (1.5 if where() else 1))

    computing.SPECIAL[op] = wrong


def no_device() -> None:
    torch_npu.npu.device_count = lambda: 0


def not_built() -> None:
    """CANN's compiler is not there."""
    put(vector_core, built=lambda *_: 0)
    os.environ.pop("ASCEND_HOME_PATH", None)


def refused_operator() -> None:
    """Groups that are one too few: a rule of CANN's sources that the fake CANN enforces."""
    from tools.npu_check.stages import operators

    keep(operators, "moe fusion_v2, tiled bfloat16, small", "moe fusion_v2, tiled bfloat16, 30B")
    real = torch_npu.npu_grouped_matmul
    torch_npu.npu_grouped_matmul = lambda **given: real(**{**given, "group_list": given["group_list"][1:]})


def wrong_operator() -> None:
    from tools.npu_check.stages import operators

    keep(operators, "silu_mul, small", "argmax, small")
    spoil("npu_swiglu")


def broken_device() -> None:
    """A kernel that accesses what it must not, after which the process cannot use the device."""
    from tools.npu_check.stages import operators

    def raises(size: Any) -> Any:
        raise RuntimeError("The Inner error is reported\nACL stream synchronize failed, error code is 507015")

    operators.OPERATORS["rms_norm"] = raises
    keep(operators, "rms_norm, small", "argmax, small", "rms_norm, 30B", "argmax, 30B")


def wrong_kernel() -> None:
    from tools.npu_check.stages import kernels

    keep(kernels, "gemv_w4a16, small, float sums", "fused_moe_w4a16, small, float sums")
    spoil("fused_moe_w4a16")


def stale_replay() -> None:
    from tests.ascend import computing
    from tools.npu_check.stages import graphs

    computing.Computing.flush = lambda self: self.pending.clear()  # type: ignore[method-assign]
    keep(graphs, "captured graph")


def killed_rank() -> None:
    from tools.npu_check.stages import collectives

    def body(**given: Any) -> Any:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        time.sleep(60)

    put(collectives, rank_body=body)
    keep(collectives, "2 ranks")


def no_callback() -> None:
    """Nobody is subscribed to the stream, as an older CANN needs it."""
    from executor.platform.ascend.versions import Versions
    from ops.ascend.bridge import Bridge
    from tests.ascend import computing
    from tools.npu_check.stages import bridge

    put(bridge, read_versions=lambda *_: Versions(None, None, "8.3", None))
    put(Bridge, subscribe=lambda self, stream: None)
    bridge.LIMIT_S, computing.SYNC_MS = 0.2, 50
    keep(bridge, "eager")


def hang() -> None:
    from tools.npu_check.stages import overlap

    put(overlap, rank_body=lambda **given: time.sleep(600))


def lost_shadows() -> None:
    """What the CPU computed is not added."""
    from tests.ascend import computing
    from tools.npu_check.stages import shadows

    computing.SPECIAL["shadow_join"] = lambda work: computing.put(work.outs[0], computing.on_cpu(work.args[1]))
    keep(shadows, "eager")
