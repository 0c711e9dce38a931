"""Each architecture's runner."""

from pathlib import Path
from typing import TYPE_CHECKING

from executor.config.case import Case
from executor.config.env import RankEnv
from models.registry import load

if TYPE_CHECKING:
    from executor.job.runner import ModelRunner

RUNNERS = {"qwen3_moe": "executor.job.qwen3_moe_runner:Qwen3MoeRunner"}


def make_runner(case: Case, results: Path, ranks: RankEnv) -> "ModelRunner":
    runner: ModelRunner = load(RUNNERS[case.model_name])(case, results, ranks)
    return runner
