"""Writes the plots and the trace of a run with shadow experts, and makes its part of the report."""

import json
from pathlib import Path
from typing import Any

import torch

from umbra.base.files import write_whole
from umbra.cpu_offload.history import summary
from umbra.cpu_offload.manager import ShadowExperts
from umbra.ops.parallel.groups import Group

TOTALS = ("hit_rate", "exposed_ms", "shadow_ms", "copies", "evictions", "evictions_for_cache")


def write_shadow_report(shadows: ShadowExperts, folder: Path, world: Group, device: torch.device) -> dict[str, Any]:
    """Writes rank 0's plots and trace next to the report. -> the part of the report about shadow experts. All ranks
    call this together."""
    report = shadows.history.report()
    row = torch.tensor([[report[key] or 0 for key in TOTALS]], dtype=torch.float32, device=device)
    rows = world.gather_rows(row, (1,) * world.size).tolist()  # resident experts differ between ranks
    report["ranks"] = [dict(zip(TOTALS, totals, strict=True)) for totals in rows]
    if world.rank > 0:
        return report
    if shadows.history.steps:
        from umbra.executor.run.plots import plot

        plot(shadows.history, folder / "offload.png")
        trace = json.dumps(shadows.history.trace()).encode()
        write_whole(folder / "offload_trace.json", lambda file: file.write(trace))
    print(f"{summary(report)}; offload.png, offload_trace.json in {folder}")
    return report
