"""Platform cuda on a machine without a GPU: the whole engine on CPU tensors, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.families import ROWS
from tests.families.row import Row
from tests.models.test_families import PROMPTS, largest_error
from tests.tiny import make_runner, oracle_logits, rounding_bound, tiny_case
from umbra.base.errors import UserError
from umbra.commands.logits import collect_logits
from umbra.executor.config.load import load_case
from umbra.executor.platform.cuda.device import CudaPlatform
from umbra.executor.platform.cuda.errors import refusal

WITHOUT_GPU = partial(CudaPlatform, device="cpu", kernels=False)


def logits_of(folder: Path, family: str, steps: int = 5, **sections: Any) -> dict[str, np.ndarray]:
    case = tiny_case(folder.parent, folder, model_name=family, platform="cuda", **sections)
    return collect_logits(make_runner(case, folder.parent, WITHOUT_GPU), PROMPTS, steps)


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.elsewhere], ids=str)
def test_logits_equal_transformers(tmp_path: Path, row: Row) -> None:
    oracle = row.save(tmp_path / "model")
    assert largest_error(logits_of(tmp_path / "model", row.name, exe_mode="graph"), oracle) < rounding_bound(
        oracle, PROMPTS
    )


@pytest.mark.parametrize("row", [row for row in ROWS.values() if not row.elsewhere], ids=str)
def test_families_that_only_the_cpu_computes_are_refused(tmp_path: Path, row: Row) -> None:
    row.save(tmp_path / "model")
    with pytest.raises(UserError, match=r"on the cpu as yet"):
        logits_of(tmp_path / "model", row.name)


@pytest.mark.parametrize("method", ["q8", "q4"])
def test_quantised_logits_stay_close(tmp_path: Path, method: str) -> None:
    oracle = ROWS["qwen3_moe"].save(tmp_path / "model", hidden_size=64, moe_intermediate_size=32, initializer_range=0.1)
    sections = {"quantization": {"method": method, "group_size": 32}}
    arrays = logits_of(tmp_path / "model", "qwen3_moe", 0, exe_mode="eager", **sections)
    expected = np.concatenate([oracle_logits(oracle, prompt).numpy() for prompt in PROMPTS])
    ours = np.concatenate([arrays[f"prefill_{i}"] for i in range(len(PROMPTS))])
    assert 0 < np.abs(ours - expected).mean() < {"q8": 0.1, "q4": 0.4}[method] * np.abs(expected).mean()


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["world_size=2"], "world_size: 2: platform: cuda runs on one GPU"),
        (["kv_dtype=int8"], "kv_dtype: int8 is not supported"),
        (["exe_mode=acl_graph"], "exe_mode: 'acl_graph' is not one of cuda's: eager, graph"),
        (["enable_cache_compile=true"], "has nothing to keep on platform: cuda"),
    ],
)
def test_a_case_that_cannot_run_is_refused(settings: list[str], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        load_case("demo", ['platform="cuda"', "exe_mode=graph", *settings])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="platform: cuda needs"):
        make_runner(load_case("demo", ['platform="cuda"', "exe_mode=graph"]), tmp_path)


def test_what_the_gpu_refuses_is_one_line() -> None:
    full = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
    assert refusal(RuntimeError(full)).startswith("out of memory: the GPU has no 2.00 GiB left")
    lost = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
    assert refusal(RuntimeError(lost)).startswith("the GPU failed: an illegal memory access was encountered")
    assert refusal(RuntimeError("shapes differ")) == ""
