"""An EAGLE3 head on the fake NPU: guesses in every mode change no token."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.ascend.engine import ascend_case, ascend_runner, generate
from tests.ascend.ranks import run_ranks
from tests.fakes.drafts import FreeDrafts
from tests.models.test_eagle3 import Head

MODES = "eager", "acl_graph", "ge_graph"


def answers(rank: int, folder: Path, mode: str) -> tuple[list[list[int]], int]:
    from tests.ascend import computing

    computing.start()
    more = f"exe_mode={mode}", "strict=true", "max_new_tokens=24"
    plain = generate(ascend_runner(ascend_case(folder, *more, num_hidden_layers=6), folder))
    if not (folder / "head").exists():
        Head(folder / "head", AutoModelForCausalLM.from_pretrained(folder / "model"), [1, 2, 4], (2, 3, 5))
    drafts = "draft_config.method=eagle3", f"draft_config.model_path={folder / 'head'}"
    runner = ascend_runner(ascend_case(folder, *more, *drafts), folder)
    runner.loop.scheduler.drafts = FreeDrafts(3)
    tokens = [s.generated for s in generate(runner)]
    assert tokens == [s.generated for s in plain]
    return tokens, runner.loop.timings.drafted_tokens


@pytest.mark.thorough
def test_tokens_are_those_without_drafts(tmp_path: Path) -> None:
    runs = [run_ranks(answers, 1, tmp_path, mode)[0] for mode in MODES]
    assert all(run == runs[0] for run in runs)
    assert runs[0][1] > 50
