"""The report of a run."""

import dataclasses

from umbra.executor.config.load import load_case
from umbra.executor.engine.step.timings import Timings
from umbra.executor.run.report import Completion, make_report


def test_the_report_of_a_run() -> None:
    timings = Timings([0.3, 0.1, 0.2], 50, 0.5, 30, 2.0, [0.02, 0.04, 0.01, 0.03], [], 9, 4)
    case = load_case("demo")
    report = make_report(case, [Completion("p", "t", [1, 2], "stop")], timings, 123, {"a": "b"}, [{"x": 1}])
    assert set(report.pop("versions")) == {"python", "torch", "machine"}
    assert report.pop("settings") == dataclasses.asdict(case)
    assert report == {
        "case": "demo",
        "platform": "cpu",
        "exe_mode": "graph",
        "world_size": 1,
        "completions": [{"prompt": "p", "text": "t", "tokens": [1, 2], "finish_reason": "stop"}],
        "ttft_ms": 200.0,
        "tpot_ms_p50": 20.0,
        "tpot_ms_p99": 40.0,
        "prefill_tokens": 50,
        "prefill_tokens_per_s": 100.0,
        "decode_tokens": 30,
        "decode_tokens_per_s": 15.0,
        "drafted_tokens": 9,
        "accepted_tokens": 4,
        "peak_memory_bytes": 123,
        "kernels": {"a": "b"},
        "placements": [{"x": 1}],
    }
    none = make_report(case, [], Timings([0.5], 1, 0.5), 0, {}, [])
    assert (none["tpot_ms_p50"], none["tpot_ms_p99"], none["decode_tokens_per_s"]) == (None, None, None)
