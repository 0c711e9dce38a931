"""Tiny random checkpoints of each family, written by transformers, and cases that run them."""

import copy
import os
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel

from tests.families import ROWS
from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.model_runner import ModelRunner, PlatformMaker
from umbra.executor.model_runner import make_runner as new_runner

ONE_RANK = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1, error_file="")
save_tiny = ROWS["qwen3_moe"].save
save_tiny_m2 = ROWS["minimax_m2"].save


def save_tiny_of(folder: Path, family: str, **options: Any) -> Any:
    return ROWS[family].save(folder, **options)


def write_case(path: Path, model: Path, **sections: Any) -> Path:
    """A case file for the checkpoint in `model`; `sections` are laid over the defaults, section by section."""
    case: dict[str, Any] = {
        "model_path": str(model),
        "model_config": {"dtype": "float32"},
        "data_config": {"prompts": ["x"], "input_max_len": 48, "max_new_tokens": 8, "batch_size": 4},
        "cache_config": {"page_size": 4},
        "quantization": {"keep_packed": False},
        "threads": 1,  # tests run on all cores
    }
    for name, value in sections.items():
        case[name] = case.get(name, {}) | value if isinstance(value, dict) else value
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(yaml.safe_dump(case))
    new.replace(path)  # ranks write and read the same file at the same time
    return path


def tiny_case(folder: Path, model: Path, **sections: Any) -> Case:
    return load_case(str(write_case(folder / "tiny.yaml", model, **sections)))


def make_runner(case: Case, results: Path, platform: PlatformMaker | None = None) -> ModelRunner:
    runner = new_runner(case, results, ONE_RANK)
    runner.setup(platform)
    return runner


@torch.no_grad()
def oracle_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()


@torch.no_grad()
def rounding_bound(oracle: PreTrainedModel, prompts: list[list[int]]) -> float:
    """Returns how far rounding to float32 may move a logit of `oracle`, which depends on how much the model amplifies.

    A float32 sum of k products, in whatever order an instruction set takes it, is the exact sum of products that are
    each changed by some sqrt(k / 2) units of roundoff. No sum of a tiny model has more than 256 products, so the bound
    is the most that logits move when every weight changes by 16 units, up or down by chance."""
    chance, changed = torch.Generator().manual_seed(0), copy.deepcopy(oracle)
    for weight in changed.parameters():
        weight.mul_(1 + 2**-20 * (2 * torch.randint(2, weight.shape, generator=chance) - 1))
    bound = max(float((oracle_logits(changed, ids) - oracle_logits(oracle, ids)).abs().max()) for ids in prompts)
    assert 0 < bound < 1e-3  # known mistakes move logits 30 times as far
    return bound
