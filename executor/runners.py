"""Each architecture's runner."""

from pathlib import Path
from typing import TYPE_CHECKING

from executor.config import Case
from executor.env import RankEnv
from models.registry import load

if TYPE_CHECKING:
    from executor.model_runner import ModelRunner

RUNNERS = {"qwen3_moe": "executor.qwen3_moe_runner:Qwen3MoeRunner"}


def make_runner(case: Case, results: Path, ranks: RankEnv) -> "ModelRunner":
    runner: ModelRunner = load(RUNNERS[case.model_name])(case, results, ranks)
    return runner
