"""Demo models, all experts resident: the tokens that the same ops compute on the CPU, op by op and in graphs."""

import functools
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from umbra.base.files import ROOT
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case, read_yaml
from umbra.executor.model_runner import make_runner
from umbra.executor.plan.resolve import resolve
from umbra.executor.platform.cuda.device import CudaPlatform
from umbra.executor.run.prompts import encode_prompts
from umbra.models.tokenizers import open_tokenizer
from umbra.tools.npu_check.outcome import Check, Passed, Skipped

CASES = {
    "demo": ("demo", {}),
    "demo, drafts": ("demo", {"draft_config.method": "lookup"}),
    "demo, learnt drafts": (
        "demo",
        {"draft_config.method": "eagle3", "draft_config.model_path": "checkpoints/austen_moe_eagle3"},
    ),
    "demo_awq": ("demo_awq", {}),
    "demo_hybrid": ("demo_hybrid", {}),
    "demo_minimax": ("demo_minimax", {}),
    "demo_minimax_fp8": ("demo_minimax_fp8", {}),
}
ONE_RANK = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1, error_file="")
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_new_tokens": 24, "batch_size": 4, "temperature": 0}


def checks() -> list[Check]:
    return [
        Check(f"{name}, {mode}", partial(same_tokens, *case, mode))
        for name, case in CASES.items()
        for mode in ("eager", "graph")
    ]


def same_tokens(case: str, settings: dict[str, Any], mode: str) -> Passed:
    """Compares whole completions. Dense products are float32, and GPUs use no TF32 unless they are told to."""
    folder = read_yaml(ROOT / "yaml_configs" / f"{case}.yaml", "a case")["model_path"]
    if not any((ROOT / folder).glob("*.safetensors")):
        raise Skipped(f"{folder} has no weights here")
    if not torch.cuda.is_available():
        raise Skipped("torch sees no GPU")
    wanted, _ = completions(case, "cpu", "eager", tuple(settings.items()))
    generated, times = completions(case, "cuda", mode, tuple(settings.items()))
    for ours, theirs in zip(generated, wanted, strict=True):
        if ours != theirs:
            same = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            raise AssertionError(f"token {same} of {len(theirs)} differs: {ours[same:][:4]} for {theirs[same:][:4]}")
    return Passed(f"{sum(map(len, generated))} tokens", times)


@functools.cache
def completions(
    name: str, device: str, mode: str, settings: tuple[tuple[str, Any], ...]
) -> tuple[list[list[int]], dict[str, float]]:
    """The tokens of all prompts, from ops on `device`, and what they took."""
    overrides = SETTINGS | dict(settings) | {"exe_mode": mode}
    case = load_case(name, ['platform="cuda"', *(f"{key}={value}" for key, value in overrides.items())])
    runner = make_runner(resolve(case, silent=True), Path("results/gpu_check"), ONE_RANK)
    runner.setup(partial(CudaPlatform, device="cpu", kernels=False) if device == "cpu" else CudaPlatform)
    vocabulary, template = runner.config.vocab_size, case.model_config.chat_template
    tokenizer = open_tokenizer(runner.folder, True, vocabulary, template)
    if tokenizer is None:
        raise AssertionError(f"{name} has no tokenizer")
    prompts = list(zip(case.data_config.prompts, encode_prompts(case, tokenizer), strict=True))
    start = time.perf_counter()
    generated = [list(sequence.generated) for sequence in runner.model_generate(prompts)]
    return generated, {"s": round(time.perf_counter() - start, 2)}
