"""Shadow experts on several ranks, which check that tokens and logits equal those without shadows."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.families.minimax_m2 import AS_OTHERS
from tests.ranks import launch_ranks, run_ranks
from tests.tiny import save_tiny, save_tiny_m2, save_tiny_of, write_case

pytestmark = pytest.mark.slow

SPLITS: dict[str, tuple[int, dict[str, int]]] = {  # kilobytes of a rank's arena: too few for all experts and all pages
    "tp2": (90, dict(world_size=2)),
    "dp2_tp2_moe_2x2": (60, dict(world_size=4, attn_tp_size=2, moe_tp_size=2)),
    "dp4_ep4": (56, dict(world_size=4, attn_tp_size=1, moe_tp_size=1)),
}


def program(folder: Path, split: str, *options: str, family: str = "qwen3_moe") -> tuple[str, list[str]]:
    """A case in `folder`, and what its ranks run."""
    arena, sizes = SPLITS[split]
    if family == "minimax_m2":
        save_tiny_m2(folder / "model", **AS_OTHERS | {"num_key_value_heads": 8})
    elif family == "gpt_oss":
        arena = 45  # layers with windows need fewer pages
        small = dict(hidden_size=32, intermediate_size=16, head_dim=8, num_hidden_layers=2, num_key_value_heads=8)
        save_tiny_of(folder / "model", family, eos_token_id=None, **small)
    elif family == "deepseek_v3":
        save_tiny_of(folder / "model", family, eos_token_id=None, num_hidden_layers=3)
    else:
        save_tiny(folder / "model", eos_token_id=None, num_key_value_heads=8)
    data = {"batch_size": 4, "input_max_len": 24, "max_new_tokens": 24}
    case = write_case(folder / "tiny.yaml", folder / "model", model_name=family, threads=1, data_config=data)
    overrides = [f"{name}={size}" for name, size in sizes.items()]
    arguments = [str(case), str(arena), str(folder), *overrides, *options]
    return str(case), ["tests/executor/run/offload_ranks.py", *arguments]


@pytest.mark.parametrize(
    ("family", "split", "options"),
    [
        ("qwen3_moe", "tp2", []),
        # Captures call op by op what eager runs do.
        pytest.param("qwen3_moe", "dp2_tp2_moe_2x2", ["--graph"], marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", "dp4_ep4", ["--graph"], marks=pytest.mark.thorough),
        pytest.param("minimax_m2", "dp2_tp2_moe_2x2", ["--graph"], marks=pytest.mark.thorough),
        pytest.param("deepseek_v3", "dp2_tp2_moe_2x2", ["--graph"], marks=pytest.mark.thorough),
        pytest.param("gpt_oss", "dp2_tp2_moe_2x2", ["--graph"], marks=pytest.mark.thorough),
    ],
)
def test_ranks_with_other_residents_agree(tmp_path: Path, family: str, split: str, options: list[str]) -> None:
    size = SPLITS[split][1]["world_size"]
    _, ranks_program = program(tmp_path, split, *options, family=family)
    done = run_ranks(tmp_path, size, ranks_program)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks: list[list[dict[str, Any]]]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(size)]
    for runs in zip(*ranks, strict=True):
        assert len({len(run["residents"]) for run in runs}) == 1  # the same steps everywhere
        assert len({json.dumps(run["residents"]) for run in runs}) == len(runs)  # other residents on each
        assert all(0 < run["hit_rate"] < 1 and run["copies"] > 0 for run in runs)
        if runs[0]["mode"] == "elastic":
            assert all(run["evictions_for_cache"] > 0 for run in runs)


@pytest.mark.thorough
def test_a_stopped_pool_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    """The other rank waits for it in a collective."""
    case, ranks_program = program(tmp_path, "tp2", "--stop")
    done = launch_ranks(case, ["world_size=2"], ranks_program)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "error: shadow experts: layer 0, step 1: the shadow pool was stopped"
    assert not list(tmp_path.glob("rank*.json"))
