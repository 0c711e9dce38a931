"""The report of a run, what is printed of it, and the plot of a run with shadow experts."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.config.load import load_case
from executor.engine.timings import Timings
from executor.run.plots import plot
from executor.run.report import Completion, make_report, print_report
from tests.cpu_offload.test_history import history

REPORT: dict[str, Any] = {
    "completions": [
        {"prompt": "A", "text": "b", "tokens": [1], "finish_reason": "stop"},
        {"prompt": "C", "text": "de", "tokens": [2, 3], "finish_reason": "length"},
    ],
    "settings": {"model_config": {"dtype": "float32"}, "data_config": {"batch_size": 2}},
    "case": "demo", "platform": "cpu", "exe_mode": "eager", "world_size": 4,
    "ttft_ms": 12.345, "prefill_tokens_per_s": 99.6, "prefill_tokens": 7,
    "tpot_ms_p50": 1.25, "tpot_ms_p99": 2.5, "decode_tokens_per_s": 640.4, "decode_tokens": 80,
    "drafted_tokens": 12, "accepted_tokens": 9, "peak_memory_bytes": 123_400_000,
    "placements": [],
}  # fmt: skip


def test_the_report_of_a_run() -> None:
    timings = Timings([0.3, 0.1, 0.2], 50, 0.5, 30, 2.0, [0.02, 0.04, 0.01, 0.03], [], 9, 4)
    case = load_case("demo")
    report = make_report(case, [Completion("p", "t", [1, 2], "stop")], timings, 123, {"a": "b"}, [{"x": 1}])
    assert set(report.pop("versions")) == {"python", "torch", "machine"}
    assert report.pop("settings") == dataclasses.asdict(case)
    assert report == {
        "case": "demo", "platform": "cpu", "exe_mode": "graph", "world_size": 1,
        "completions": [{"prompt": "p", "text": "t", "tokens": [1, 2], "finish_reason": "stop"}],
        "ttft_ms": 200.0, "tpot_ms_p50": 20.0, "tpot_ms_p99": 40.0, "prefill_tokens": 50,
        "prefill_tokens_per_s": 100.0, "decode_tokens": 30, "decode_tokens_per_s": 15.0, "drafted_tokens": 9,
        "accepted_tokens": 4, "peak_memory_bytes": 123, "kernels": {"a": "b"}, "placements": [{"x": 1}],
    }  # fmt: skip
    none = make_report(case, [], Timings([0.5], 1, 0.5), 0, {}, [])
    assert (none["tpot_ms_p50"], none["tpot_ms_p99"], none["decode_tokens_per_s"]) == (None, None, None)


def test_the_report_is_a_table_below_the_completions(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(REPORT, Path("report.json"))
    assert capsys.readouterr().out == (
        "\n[0] A\n--> b   (1 tokens, stop)\n"
        "\n[1] C\n--> de   (2 tokens, length)\n"
        "\n"
        "  case                 demo: cpu, eager, 4 rank(s), float32, batch 2\n"
        "  time to first token  12.3 ms (median)\n"
        "  prefill              100 tokens/s (7 tokens)\n"
        "  time per token       1.2 ms (p50), 2.5 ms (p99)\n"
        "  decode               640 tokens/s (80 tokens)\n"
        "  drafts               9 of 12 drafted tokens accepted\n"
        "  peak memory          123 MB (largest rank)\n"
        "  report               report.json\n"
    )


def test_lines_are_there_where_there_is_something_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    placements = [{"before": 1.62, "after": 1.12, "experts": 7}, {"before": 1.2, "after": 1.08, "experts": 2}]
    print_report(REPORT | {"tpot_ms_p50": None, "drafted_tokens": 0, "placements": placements}, Path("report.json"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    names = [line.split("  ")[1].strip() for line in lines]
    assert names == ["case", "time to first token", "prefill", "busiest rank", "peak memory", "report"]
    said = "1.62 times the mean of tokens for experts, 1.08 after 2 placement(s), 9 experts moved"
    assert any(line.endswith(said) for line in lines)


def test_a_run_with_shadow_experts_is_drawn(tmp_path: Path) -> None:
    of = history()
    of.routed = np.array([[3, 9, 6], [0, 0, 12]])
    plot(of, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
