"""What a run prints of its report: lines about decoding and drafts only where there was any."""

from pathlib import Path
from typing import Any

import pytest

from executor.run.report import _percentile, print_report

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


def test_a_run_without_decode_steps_has_no_lines_about_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(REPORT | {"tpot_ms_p50": None, "drafted_tokens": 0}, Path("report.json"))
    names = [line.split("  ")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert names == ["case", "time to first token", "prefill", "peak memory", "report"]


def test_placed_experts_have_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    placements = [{"before": 1.62, "after": 1.12, "experts": 7}, {"before": 1.2, "after": 1.08, "experts": 2}]
    print_report(REPORT | {"placements": placements}, Path("report.json"))
    line = "busiest rank         1.62 times the mean of tokens for experts, 1.08 after 2 placement(s), 9 experts moved"
    assert line in capsys.readouterr().out


HUNDRED = [float(i) for i in range(1, 101)]


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [
        ([7.0], 0.5, 7.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0], 0.99, 3.0),
        (HUNDRED, 0.99, 99.0),
        ([*HUNDRED, 101.0], 0.99, 100.0),
    ],
)
def test_a_percentile_is_the_least_value_of_at_least_that_share(
    values: list[float], share: float, found: float
) -> None:
    assert _percentile(values, share) == found
