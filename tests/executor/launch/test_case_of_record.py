"""The case that a launcher writes is the one that its ranks run."""

import os
from pathlib import Path

import pytest

from umbra.executor.config.load import load_case
from umbra.executor.config.resolved import read_resolved
from umbra.executor.launch import launch
from umbra.executor.plan.resolve import resolve


def test_a_case_is_whole_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prefill steps are as large as its device's memory allows, which a rank does not find out again."""
    case = load_case("qwen3_next_80b_w4a16_offload", ["memory_gb=29"])

    def replaced(program: str, command: list[str]) -> None:
        raise SystemExit(" ".join(command[-4:]))

    monkeypatch.setattr(launch, "create_results", lambda name: tmp_path)
    monkeypatch.setattr(launch, "start_environment", lambda *_: {})
    monkeypatch.setattr(os, "execv", replaced)
    with pytest.raises(SystemExit, match=f"--results {tmp_path} --resolved {tmp_path}/case.json"):
        launch.launch(case, ["-m", "program"])
    written = read_resolved(tmp_path / "case.json")
    assert case.data_config.chunked_prefill_size is None
    assert (written.data_config.chunked_prefill_size or 0) % 1024 == 0
    assert 0 < written.prefill_tokens < case.prefill_tokens
    assert resolve(written) is written
