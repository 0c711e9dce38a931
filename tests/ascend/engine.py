"""A tiny model on the real Ascend platform over the fake device."""

import dataclasses
from pathlib import Path
from typing import Any

from executor.config.case import Case
from executor.config.env import RankEnv
from executor.config.load import load_case
from executor.engine.sequence import Sequence, new_sequence
from executor.job.runner import ModelRunner, make_runner
from executor.platform.base import Platform
from executor.platform.settings import PlatformSettings
from tests.tiny import ONE_RANK, save_tiny, write_case

# head_dim 64: the narrowest that the rotary op takes
SIZES = dict(hidden_size=128, head_dim=64, num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=64)
PROMPTS = [[5, 17, 3, 88], [7], list(range(30, 53))]


def ascend_case(folder: Path, *overrides: str, **sizes: Any) -> Case:
    """A case of bfloat16 for a model of two layers; both are written to `folder` by the first call."""
    path = folder / f"{folder.name}.yaml"
    if not path.exists():
        save_tiny(folder / "model", **SIZES | sizes)
        data = {"prompts": ["x"], "input_max_len": 48, "max_new_tokens": 6, "batch_size": 4}
        write_case(
            path, folder / "model", platform="ascend", model_config={"dtype": "bfloat16"},
            cache_config={"page_size": 128}, data_config=data,
        )  # fmt: skip
    return load_case(str(path), ["ignore_eos=true", *overrides])


def ascend_runner(case: Case, folder: Path, ranks: RankEnv = ONE_RANK) -> ModelRunner:
    """A runner of `case` on the fake NPU; compiled graphs that it keeps are in `folder`/cache."""
    from executor.platform.ascend.device import AscendPlatform

    def make_platform(settings: PlatformSettings, ranks: RankEnv) -> Platform:
        return AscendPlatform(dataclasses.replace(settings, graphs=settings.graphs and folder / "cache"), ranks)

    runner = make_runner(case, folder, ranks)
    runner.setup(make_platform)
    return runner


def generate(runner: ModelRunner, prompts: list[list[int]] = PROMPTS) -> list[Sequence]:
    return runner.model_generate([("", ids) for ids in prompts])


def prefilled(runner: ModelRunner, prompts: list[list[int]] = PROMPTS) -> list[Sequence]:
    """Sequences after their first token, ready to decode."""
    for i, ids in enumerate(prompts):
        runner.loop.add(new_sequence(i, runner.request(i, ids, runner.case.data_config.max_new_tokens)))
    running = runner.loop.scheduler.running
    while not running or not all(s.decoding for s in running):
        runner.loop.step()
        running = runner.loop.scheduler.running
    return running
