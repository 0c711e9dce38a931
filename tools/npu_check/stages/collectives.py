"""Stage 6: all-reduce and all-gather over 2 ranks and over all dies, eager and captured, also on the vector cores; and
the reduce-scatter and all-gather that replace an all-reduce in a sequence-parallel prefill."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from umbra.executor.config.env import rank_env
from umbra.tools.npu_check import ranks
from umbra.tools.npu_check.environment import ascend_overrides, case_environment, demo_case
from umbra.tools.npu_check.outcome import Check, Passed
from umbra.tools.npu_check.stage import TWO_AIV
from umbra.tools.npu_check.stages.model import require_dies

BYTES = (4 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20)  # 8 KB is a token of 235B
LOOPS, ROUNDS = 10, 10


def checks(logs: Path) -> list[Check]:
    import torch_npu

    listed = [Check("2 ranks", partial(over, logs, 2, False)), Check(TWO_AIV, partial(over, logs, 2, True))]
    if (dies := torch_npu.npu.device_count()) > 2:
        listed += [Check(f"{dies} ranks{name}", partial(over, logs, dies, bool(name))) for name in ("", ", AIV")]
    return listed


def overrides_of(size: int, aiv: bool) -> list[str]:
    return ascend_overrides(f"world_size={size}", f"aiv_group={'attn_tp' if aiv else 'none'}", "deterministic=false")


def over(logs: Path, size: int, aiv: bool) -> Passed:
    require_dies(size)
    overrides, name = overrides_of(size, aiv), f"{size}{'aiv' if aiv else ''}"
    environment = case_environment(demo_case(overrides), os.environ)
    function = "umbra.tools.npu_check.stages.collectives:rank_body"
    rows: list[dict[str, Any]]
    rows = ranks.run(function, size, environment, logs / name, {"overrides": overrides, "sizes": BYTES})[0]["rows"]
    way = f"all-reduce of {size} ranks{', AIV' if aiv else ''}"
    times = ("eager_us", "shares_us")
    measured = [{"way": way, "bytes": row["bytes"], "us": row["graph_us"]} | {t: row[t] for t in times} for row in rows]
    text = ", ".join(
        f"{row['bytes'] >> 10} KB {row['eager_us']:.0f}/{row['graph_us']:.0f}/{row['shares_us']:.0f}" for row in rows
    )
    return Passed(f"us eager/in a graph/as reduce-scatter and all-gather: {text}", {"collectives": measured})


def rank_body(overrides: list[str], sizes: list[int]) -> dict[str, Any]:
    """One rank: checks every size, then times it."""
    import torch

    from umbra.executor.launch.join import init_parallel
    from umbra.executor.plan.platform_settings import platform_settings
    from umbra.executor.platform.ascend.device import AscendPlatform
    from umbra.tools.benchmarks.npu_layers import Graph, alternate
    from umbra.tools.npu_check.numbers import require

    case, own = demo_case(overrides), rank_env()
    platform = AscendPlatform(platform_settings(case), own)
    group, rows = init_parallel(case, own, platform).world, []
    for size in sizes:
        count = size // 2 // own.world_size * own.world_size
        part = torch.arange(count) % 7  # every sum is an integer that bfloat16 holds, for 16 ranks and more
        x = (part % 3 + own.rank % 2).bfloat16().to(platform.device)
        y = torch.empty_like(x)
        total = (part % 3) * own.world_size + own.world_size // 2

        def reduce(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            y.copy_(x)
            return group.all_reduce(y)

        def gather(x: torch.Tensor = x) -> torch.Tensor:
            return group.gather_rows(x[:64], None)

        def shares(x: torch.Tensor = x) -> torch.Tensor:
            return group.gather_rows(group.sum_rows(x, None), None)

        every = torch.cat([(part[:64] % 3 + rank % 2) for rank in range(own.world_size)])
        require(f"all-reduce of {size} bytes", reduce(), total, 0.0)
        require(f"all-gather, {size} bytes", gather(), every, 0.0)
        require(f"reduce-scatter and all-gather, {size} bytes", shares(), total, 0.0)
        graph = Graph([*[reduce] * LOOPS, gather])
        x.mul_(2)
        y.zero_()
        graph.replay()
        require(f"all-reduce of {size} bytes in a graph", graph.results[0], 2 * total, 0.0)
        require(f"all-gather in a graph, {size} bytes", graph.results[-1], 2 * every, 0.0)
        us = alternate({"eager": reduce, "graph": graph.replay, "shares": shares}, ROUNDS)
        times = {"eager_us": us["eager"], "graph_us": us["graph"] / LOOPS, "shares_us": us["shares"]}
        rows.append({"bytes": size} | times)
    return {"rows": rows}
