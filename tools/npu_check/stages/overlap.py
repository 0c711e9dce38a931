"""Stage 8: an all-reduce on the vector cores beside a mixture of experts on them, on two streams."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from umbra.tools.npu_check import ranks
from umbra.tools.npu_check.environment import case_environment, demo_case
from umbra.tools.npu_check.numbers import EIGHTH
from umbra.tools.npu_check.outcome import Check, Passed
from umbra.tools.npu_check.stages.collectives import overrides_of
from umbra.tools.npu_check.stages.model import require_dies

LOOPS, ROUNDS = 20, 10
COUNT = 16 << 10  # elements of the all-reduce: four tokens of 235B


def checks(logs: Path) -> list[Check]:
    return [Check("2 ranks", partial(together, logs))]


def together(logs: Path) -> Passed:
    require_dies(2)
    overrides = overrides_of(2, True)
    environment = case_environment(demo_case(overrides), os.environ)
    function = "umbra.tools.npu_check.stages.overlap:rank_body"
    us = ranks.run(function, 2, environment, logs / "2aiv", {"overrides": overrides})[0]
    return Passed(
        f"us of a kernel {us['kernel']:.1f}, of an all-reduce {us['reduce']:.1f}, of both at once {us['both']:.1f}", us
    )


def rank_body(overrides: list[str]) -> dict[str, Any]:
    """Both LOOPS times, each alone and then at once. In whatever order they get the cores, both must end, with the
    numbers that they have alone."""
    import torch
    import torch_npu

    from umbra.executor.config.env import rank_env
    from umbra.executor.launch.join import init_parallel
    from umbra.executor.plan.platform_settings import platform_settings
    from umbra.executor.platform.ascend.device import AscendPlatform
    from umbra.ops.ascend import vector_core
    from umbra.tools.benchmarks import npu_layers
    from umbra.tools.npu_check.numbers import require

    case, own = demo_case(overrides), rank_env()
    platform = AscendPlatform(platform_settings(case), own)
    npu_layers.start(vector_core.EXTENSION)
    group = init_parallel(case, own, platform).world
    torch.manual_seed(own.rank)
    shape = npu_layers.LayerShape(EIGHTH.hidden, EIGHTH.inner, EIGHTH.experts, EIGHTH.top_k, 32, 1, "bfloat16")
    experts = npu_layers.random_experts(shape, platform.device, in_planes=True)
    layer = npu_layers.layer(experts, experts, shape, 8, platform.device)
    x, y = torch.ones(COUNT, device=platform.device), torch.empty(COUNT, device=platform.device)
    side = torch_npu.npu.Stream()
    results: list[torch.Tensor] = []

    def reduce() -> None:
        for _ in range(LOOPS):
            y.copy_(x)
            group.all_reduce(y)

    def kernel() -> None:
        results[:] = [layer.custom() for _ in range(LOOPS)]

    def both() -> None:
        side.wait_stream(torch_npu.npu.current_stream())
        with torch_npu.npu.stream(side):
            kernel()
        reduce()
        torch_npu.npu.current_stream().wait_stream(side)

    alone = layer.custom().cpu()
    both()
    torch_npu.npu.synchronize()
    require("the all-reduce beside a kernel", y, torch.full((COUNT,), float(own.world_size)), 0.0)
    for result in results:
        require("the kernel beside an all-reduce", result, alone, 0.01)
    us = npu_layers.alternate({"kernel": kernel, "reduce": reduce, "both": both}, ROUNDS)
    return {name: seconds / LOOPS for name, seconds in us.items()}
