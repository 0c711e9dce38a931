"""What a run with shadow experts leaves behind: plots, a trace, and a part of the report."""

import json
from pathlib import Path
from typing import Any

import torch

from cpu_offload.manager import Offload
from executor.parallel.groups import Group
from files import write_whole

TOTALS = ("hit_rate", "exposed_ms", "shadow_ms", "copies", "evictions", "evictions_for_cache")


def write_offload(offload: Offload, folder: Path, world: Group, device: torch.device) -> dict[str, Any]:
    """Rank 0's plots and trace beside the report. -> what the report says of them; called on all ranks"""
    report = offload.history.report()
    row = torch.tensor([[report[key] or 0 for key in TOTALS]], dtype=torch.float32, device=device)
    rows = world.gather_rows(row, (1,) * world.size).tolist()  # each rank has its own residents
    report["ranks"] = [dict(zip(TOTALS, each, strict=True)) for each in rows]
    if world.rank > 0:
        return report
    if offload.history.steps:
        from executor.job.plots import plot  # matplotlib takes a second to import

        plot(offload.history, folder / "offload.png")
        trace = json.dumps(offload.history.trace()).encode()
        write_whole(folder / "offload_trace.json", lambda file: file.write(trace))
    rate, exposed, streamed = report["hit_rate"], report["exposed_ms"], report["streamed"]
    print(
        f"shadow experts: hit rate {'-' if rate is None else f'{rate:.3f}'}, {report['shadow_ms']:.1f} ms on the CPU, "
        f"{'' if exposed is None else f'of which {exposed:.1f} exposed, '}{report['copies']} copies, "
        f"{report['evictions']} evictions ({report['evictions_for_cache']} for the cache)"
        + (f", {streamed['bytes'] / 1e6:.1f} MB streamed" if streamed["bytes"] else "")
        + f"; offload.png, offload_trace.json in {folder}"
    )
    return report
