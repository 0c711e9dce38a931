"""Constants of the models and of the planner, fitted to what the stages measured, next to those that are assumed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from umbra.tools.benchmarks.vector_core_machine import HIGH, LOW
from umbra.tools.npu_check.outcome import Measured, Outcome


@dataclass(frozen=True)
class Constant:
    name: str
    assumed: str
    measured: float
    unit: str
    source: str  # the cases that were measured, and where the assumed value is


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(a, b) of time = a + size / b, by least squares of relative errors; b is infinite if times do not grow."""
    size, time = np.array(sizes, dtype=float), np.array(times, dtype=float)
    rows = np.stack([np.ones_like(size), size], 1) / time[:, None]
    (a, slope), *_ = np.linalg.lstsq(rows, np.ones_like(time), rcond=None)
    return float(a), float(1 / slope) if slope > 0 else float("inf")


def constants(outcomes: Sequence[Outcome]) -> list[Constant]:
    """Returns the constants that can be fitted to the measurements of these outcomes."""
    measured = {f"{o.stage}/{o.case}": o.measured for o in outcomes if o.measured}
    known: list[Constant] = []
    for source, values in measured.items():
        if "kernel_rows" in values:
            known += _vector_cores(source, values["kernel_rows"])
        if "copies" in values:
            known += _copies(source, values)
        if "launches" in values:
            known += _launches(source, values["launches"])
        if "collectives" in values:
            known += _collectives(source, values["collectives"])
    return known


def _vector_cores(source: str, rows: list[Measured]) -> list[Constant]:
    limit = max(row["limit_gbps"] for row in rows)
    where = "tools/benchmarks/vector_core_machine.py, Machine"
    memory = f"{HIGH.memory:g} to {LOW.memory:g}"
    known = [Constant("memory: plain reads and copies", memory, limit, "GB/s", f"{source}; {where}.memory")]
    if len(rows) > 1:
        us = [row["custom_us"] for row in rows]
        fixed, rate = fit_line([1e3 * row["custom_us"] * row["custom_gbps"] for row in rows], us)  # of bytes
        launch = f"{LOW.launch / 1e3:g} to {HIGH.launch / 1e3:g}, launch alone"
        known.append(
            Constant("fused_moe_w4a16: time beside its bytes", launch, fixed, "us", f"{source}; {where}.launch")
        )
        known.append(
            Constant("fused_moe_w4a16: rate of its bytes", memory, rate / 1e3, "GB/s", f"{source}; {where}.memory")
        )
    return known


def _copies(source: str, values: dict[str, Any]) -> list[Constant]:
    from umbra.cpu_offload.planner.choosing import LINK

    where = "cpu_offload/planner/choosing.py, LINK"
    copies = values["copies"]
    assumed = f"{LINK / 1e6:g}"
    return [
        Constant("pinned copies to the device", assumed, copies["h2d_gbps"], "GB/s", f"{source}; {where}"),
        Constant("pinned copies from the device", assumed, copies["d2h_gbps"], "GB/s", f"{source}; {where}"),
    ]


def _launches(source: str, values: Measured) -> list[Constant]:
    return [
        Constant("a small kernel, eager", "none", values["eager_us"], "us", source),
        Constant("a small kernel in a captured graph", "none", values["graph_us"], "us", source),
    ]


def _collectives(source: str, rows: list[Measured]) -> list[Constant]:
    known = []
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        latency, rate = fit_line([row["bytes"] for row in own], [row["us"] for row in own])
        known.append(Constant(f"{way}: latency", "none", latency, "us", source))
        known.append(Constant(f"{way}: rate", "none", rate / 1e3, "GB/s", source))
    return known
