"""Reports what a run measured, as a table for people and a JSON file for programs."""

import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from umbra.executor.config.case import Case
from umbra.executor.engine.step.timings import Timings


@dataclass(frozen=True)
class Completion:
    prompt: str
    text: str  # as it was generated, marks of reasoning and tool calls included
    tokens: list[int]
    finish_reason: str


def make_report(
    case: Case,
    completions: list[Completion],
    timings: Timings,
    peak_memory: int,
    kernels: dict[str, str],
    placements: list[dict[str, Any]],
) -> dict[str, Any]:
    """Returns the report. Times are in milliseconds. `tpot_*` are null if no prompt needed a second token, `kernels` is
    empty if the platform had only one kind of kernel, and `placements` if experts were not placed by their use."""
    token_times = sorted(timings.per_token)
    return {
        "case": case.name,
        "platform": case.platform,
        "exe_mode": case.exe_mode,
        "world_size": case.world_size,
        "completions": [asdict(c) for c in completions],
        "ttft_ms": 1e3 * statistics.median(timings.first_token),
        "tpot_ms_p50": 1e3 * _percentile(token_times, 0.50) if token_times else None,
        "tpot_ms_p99": 1e3 * _percentile(token_times, 0.99) if token_times else None,
        "prefill_tokens": timings.prompt_tokens,
        "prefill_tokens_per_s": timings.prompt_tokens / timings.prefill_seconds,
        "decode_tokens": timings.decode_tokens,
        "decode_tokens_per_s": timings.decode_tokens / timings.decode_seconds if token_times else None,
        "drafted_tokens": timings.drafted_tokens,
        "accepted_tokens": timings.accepted_tokens,
        "peak_memory_bytes": peak_memory,
        "kernels": kernels,
        "placements": placements,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()},
        "settings": asdict(case),
    }


def print_report(report: dict[str, Any], path: Path) -> None:
    for i, c in enumerate(report["completions"]):
        print(f"\n[{i}] {c['prompt']}\n--> {c['text']}   ({len(c['tokens'])} tokens, {c['finish_reason']})")
    settings = report["settings"]
    rows = [
        (
            "case",
            f"{report['case']}: {report['platform']}, {report['exe_mode']}, {report['world_size']} rank(s), "
            f"{settings['model_config']['dtype']}, batch {settings['data_config']['batch_size']}",
        ),
        ("time to first token", f"{report['ttft_ms']:.1f} ms (median)"),
        ("prefill", f"{report['prefill_tokens_per_s']:.0f} tokens/s ({report['prefill_tokens']} tokens)"),
    ]
    if report["tpot_ms_p50"] is not None:
        p50, p99, rate = report["tpot_ms_p50"], report["tpot_ms_p99"], report["decode_tokens_per_s"]
        rows.append(("time per token", f"{p50:.1f} ms (p50), {p99:.1f} ms (p99)"))
        rows.append(("decode", f"{rate:.0f} tokens/s ({report['decode_tokens']} tokens)"))
    if drafted := report["drafted_tokens"]:
        rows.append(("drafts", f"{report['accepted_tokens']} of {drafted} drafted tokens accepted"))
    if placed := report["placements"]:
        moved = sum(one["experts"] for one in placed)
        rows.append(
            (
                "busiest rank",
                f"{placed[0]['before']:.2f} times the mean of tokens for experts, "
                f"{placed[-1]['after']:.2f} after {len(placed)} placement(s), {moved} experts moved",
            )
        )
    rows.append(("peak memory", f"{report['peak_memory_bytes'] / 1e6:.0f} MB (largest rank)"))
    rows.append(("report", str(path)))
    print()
    for name, value in rows:
        print(f"  {name:<20} {value}")


def _percentile(ordered: list[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
