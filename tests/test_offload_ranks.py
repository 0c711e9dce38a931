"""Shadow experts on several ranks: real jobs, whose ranks check that tokens and logits are those without."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from executor.cases import ROOT
from tests.tiny import save_tiny, write_case

SPLITS: dict[str, tuple[int, dict[str, int]]] = {  # kilobytes of a rank's arena: too few for all experts and all pages
    "tp2": (90, dict(world_size=2)),
    "tp4_moe_2x2": (45, dict(world_size=4, moe_tp_size=2)),
    "dp2_tp2_moe_2x2": (60, dict(world_size=4, attn_tp_size=2, moe_tp_size=2)),
    "dp4_ep4": (56, dict(world_size=4, attn_tp_size=1, moe_tp_size=1)),
}


def run_job(case: Path, program: list[str], world_size: int) -> subprocess.CompletedProcess[str]:
    start = f"""
from errors import run_main
from executor.cases import load_case
from executor.launch import launch
run_main(lambda argv: launch(load_case({str(case)!r}, ["world_size={world_size}"]), {program!r}))
"""
    return subprocess.run([sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_with_other_residents_agree(tmp_path: Path, split: str) -> None:
    arena, sizes = SPLITS[split]
    save_tiny(tmp_path / "model", eos_token_id=None, num_key_value_heads=8)
    data = {"batch_size": 4, "input_max_len": 24, "max_new_tokens": 24}
    case = write_case(tmp_path / "tiny.yaml", tmp_path / "model", threads=1, data_config=data)
    out = tmp_path / "ranks.json"
    overrides = [f"{name}={size}" for name, size in sizes.items()]
    program = ["tests/offload_ranks.py", str(case), str(arena), str(out), *overrides]
    done = run_job(case, program, sizes["world_size"])
    assert done.returncode == 0, done.stdout + done.stderr
    ranks: list[list[dict[str, Any]]] = json.loads(out.read_text())
    assert len(ranks) == sizes["world_size"]
    for runs in zip(*ranks, strict=True):
        assert len({len(run["residents"]) for run in runs}) == 1  # the same steps everywhere
        assert len({json.dumps(run["residents"]) for run in runs}) == len(runs)  # other residents on each
        assert all(0 < run["hit_rate"] < 1 and run["copies"] > 5 for run in runs)
        if runs[0]["mode"] == "elastic":
            assert all(run["evictions_for_cache"] > 0 for run in runs)
