"""Ranks serve random traffic in lockstep: they never differ, and every request gets the tokens that it gets alone
without drafts.

.venv/bin/python -m tests.serving.ranks.test_lockstep 10000      # the same for longer, with every request alone
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.families.deepseek_v3 import EXPANDED
from tests.mtp import Oracle
from tests.ranks import run_ranks
from tests.tiny import save_tiny, save_tiny_of, write_case

pytestmark = [pytest.mark.slow, pytest.mark.beside]

DATA = {"input_max_len": 40, "max_new_tokens": 16, "batch_size": 8, "chunked_prefill_size": 24}
ARENA_KB = 60  # of a rank: too few for experts and all pages
FEW = {"preemptions": 3, "moved": 1, "hits": 1, "restored": 1, "drafted": 0, "whole": 2}
MANY = {"preemptions": 3, "moved": 1, "hits": 10, "restored": 5, "drafted": 3, "whole": 15}


def test_traffic_on_two_ranks(tmp_path: Path) -> None:
    check_traffic(tmp_path, 2, {"attn_tp_size": 2, "moe_tp_size": 2}, 300, 10, FEW)


@pytest.mark.thorough
def test_traffic_on_four_ranks(tmp_path: Path) -> None:
    check_traffic(tmp_path, 4, {"attn_tp_size": 2, "moe_tp_size": 2}, 800, 20, MANY)


@pytest.mark.thorough
def test_traffic_of_states(tmp_path: Path) -> None:
    check_traffic(
        tmp_path, 2, {"attn_tp_size": 2, "moe_tp_size": 2}, 400, 15, FEW | {"restored": 0}, 300, 200, "qwen3_next"
    )


@pytest.mark.thorough
def test_traffic_of_guesses(tmp_path: Path) -> None:
    """Two data-parallel groups, in which few guesses of the model's layer come true, agree on how many there are."""
    sizes = {"attn_tp_size": 1, "moe_tp_size": 1}
    check_traffic(tmp_path, 2, sizes, 150, 8, FEW | {"preemptions": -1}, 300, 150, "glm4_moe", "mtp")


@pytest.mark.thorough
def test_traffic_of_latents(tmp_path: Path) -> None:
    check_traffic(tmp_path, 4, {"attn_tp_size": 2, "moe_tp_size": 2}, 800, 20, FEW, 300, 75, "deepseek_v3")


@pytest.mark.thorough
def test_traffic_of_states_on_four_ranks(tmp_path: Path) -> None:
    check_traffic(tmp_path, 4, {"attn_tp_size": 2, "moe_tp_size": 2}, 2000, 40, MANY, 600, 145, "qwen3_next")


def check_traffic(
    folder: Path,
    world: int,
    sizes: dict[str, int],
    steps: int,
    alone: int,
    least: dict[str, int],
    limit_s: float = 300,
    kb: int = ARENA_KB,
    family: str = "",
    drafts: str = "lookup",
) -> None:
    """About `alone` requests run alone afterwards. Each of `least` happens more often than that."""
    if drafts == "mtp":
        Oracle(folder / "model", family)
    elif family:
        widths = dict(hidden_size=32, moe_intermediate_size=16) | (EXPANDED if family == "deepseek_v3" else {})
        save_tiny_of(folder / "model", family, eos_token_id=None, num_hidden_layers=4, **widths)
    else:
        save_tiny(folder / "model", eos_token_id=None, num_key_value_heads=8)
    case = write_case(
        folder / "case.yaml",
        folder / "model",
        exe_mode="graph",
        world_size=world,
        parallel_config=sizes,
        data_config=DATA,
        draft_config={"method": drafts, "tokens": 3},
        serve_config={"reserve": 2, "prefix_floor": 280 if family else 16},
        offload_config={"mode": "elastic", "arena_mb": kb / 1024, "max_swaps": 2, "measure_s": 0.05},
        model_name=family or "qwen3_moe",
        cache_config={"disk_path": str(folder / "pages"), "disk_gb": 0.01},
    )
    out = folder / "out.json"
    program = ["tests/serving/ranks/lockstep_ranks.py", str(case), str(steps), str(out), str(alone)]
    done = run_ranks(folder, world, program, limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(out.read_text())
    assert counts["steps"] == steps
    assert counts["refused"] == counts["held"] == 0
    assert all(counts[what] > count for what, count in least.items()), str(counts)
    assert counts["ended"] > counts["submitted"] // 2
    print(counts)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        check_traffic(Path(temporary), 4, {"moe_tp_size": 2}, int(sys.argv[1]), 1 << 30, MANY, 24 * 3600)
