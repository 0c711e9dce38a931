"""tools/npu_check on the fake NPU, made to compute (computing.py): all stages pass, and for each stage a fault is found
and named."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ascend import npu_check
from tests.ascend.engine import SIZES
from tests.tiny import save_tiny, write_case
from umbra.executor.config.load import load_case, model_folder
from umbra.tools.npu_check import processes, report
from umbra.tools.npu_check.__main__ import check
from umbra.tools.npu_check.outcome import FAIL, PASS, Outcome
from umbra.tools.npu_check.session import run_stage
from umbra.tools.npu_check.stage import STAGES, find


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's case and tokenizer with a model of one layer, whose steps are compiled in less time."""
    folder, demo = tmp_path_factory.mktemp("demo"), load_case("demo")
    save_tiny(folder / "model", **SIZES | {"num_hidden_layers": 1, "vocab_size": 4096, "initializer_range": 0.1})
    for file in model_folder(demo).glob("*token*"):
        shutil.copy(file, folder / "model")
    data = {"prompts": list(demo.data_config.prompts), "batch_size": 4}
    write_case(
        folder / "tiny.yaml",
        folder / "model",
        model_config={"dtype": "bfloat16"},
        data_config=data,
        cache_config={"page_size": 0},
    )
    return folder / "tiny.yaml"


Run = Callable[..., dict[str, Outcome]]


@pytest.fixture
def run(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(stage: str, fault: str = "") -> dict[str, Outcome]:
        """The outcomes of a stage by case."""
        monkeypatch.setattr(processes, "start", npu_check.forked(demo, fault))
        limited = dataclasses.replace(find(stage), limit_s=60.0)
        return {outcome.case: outcome for outcome in run_stage(limited, (), tmp_path)}

    return run


def test_the_operators_pass(run: Run) -> None:
    outcomes = run("operators")
    assert len(outcomes) > 20
    assert {outcome.result for outcome in outcomes.values()} == {PASS}, outcomes


@pytest.mark.thorough
def test_everything_passes(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "start", npu_check.forked(demo, ""))
    path = tmp_path / "report.md"
    status = check(None, path)
    text = path.read_text()
    assert status == 0, text
    assert report.FAKE in text
    for stage in STAGES:
        assert f"| {stage.name} |" in text
    for constant in ("memory: plain reads", "a small kernel, eager", "all-reduce of 2 ranks, AIV: latency"):
        assert constant in text


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "stage", "case", "text", "advice"),
    [
        ("refused_operator", "operators", "moe fusion_v2, tiled bfloat16, small", "161002", "aclnn refused"),
        ("stale_replay", "graphs", "captured graph", "replay 0 differs", "wrong numbers"),
        ("killed_rank", "collectives", "2 ranks", "rank 1 was killed by SIGKILL", "the log of that rank"),
        ("lost_shadows", "shadows", "eager", "logits differ", "wrong numbers"),
    ],
)
def test_a_fault_is_found_and_named(run: Run, fault: str, stage: str, case: str, text: str, advice: str) -> None:
    outcomes = run(stage, fault)
    assert outcomes[case].result == FAIL, outcomes
    assert text in outcomes[case].text
    assert advice in outcomes[case].hint


@pytest.mark.thorough
def test_after_an_error_of_the_device_the_other_operators_are_checked(run: Run) -> None:
    outcomes = run("operators", "broken_device")
    assert {name: o.result for name, o in outcomes.items()} == {
        "rms_norm, small": FAIL,
        "argmax, small": PASS,
        "rms_norm, 30B": FAIL,
        "argmax, 30B": PASS,
    }
    assert outcomes["rms_norm, small"].text == (
        "The Inner error is reported / ACL stream synchronize failed, error code is 507015"
    )
    assert "an address that it must not" in outcomes["rms_norm, small"].hint
