"""Splitting a model over ranks changes nothing: real jobs, started as a user starts them, against one rank."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.checkpoint.tokenizer import Tokenizer
from executor.config.load import load_case
from executor.job.logits import collect_logits, sized_for
from executor.job.prompts import encode_prompts
from files import ROOT
from tests.tiny import make_runner, save_tiny, tiny_case, write_case

STEPS = 6
IDS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(30, 53)), [2, 2], [60, 61, 62]]
SPLITS: dict[str, dict[str, Any]] = {
    "tp2": dict(world_size=2),
    "tp4_moe_2x2": dict(world_size=4, moe_tp_size=2),
    "tp8": dict(world_size=8),
    "tp8_ep8": dict(world_size=8, moe_tp_size=1, embed_tp_size=4, lmhead_tp_size=2),
    "tp4_graph": dict(world_size=4, moe_tp_size=2, exe_mode="graph"),
    "dp4_tp2_moe_2x4": dict(world_size=8, attn_tp_size=2, moe_tp_size=2, batch_size=8),
    "dp4_moe_tp4_graph": dict(world_size=4, attn_tp_size=1, batch_size=8, exe_mode="graph"),
    "dp4_moe_tp4": dict(world_size=4, attn_tp_size=1, batch_size=8),
}
DEMO_SPLITS: dict[str, dict[str, Any]] = {
    "tp2": dict(world_size=2),
    "tp4": dict(world_size=4),
    "tp8": dict(world_size=8),
    "tp8_moe_2x4": dict(world_size=8, moe_tp_size=2),
}


def run_split(case: str, split: dict[str, Any], ids: list[list[int]], out: Path) -> dict[str, np.ndarray]:
    overrides = ["dtype=float32", "method=none", *(f"{k}={v}" for k, v in split.items())]
    text = ";".join(",".join(map(str, row)) for row in ids)
    command = [sys.executable, "executor/job/logits.py", "--case", case, "--set", *overrides]
    command += ["--ids", text, "--steps", str(STEPS), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(out) as arrays:
        return dict(arrays)


def assert_same(split: dict[str, np.ndarray], alone: dict[str, np.ndarray]) -> None:
    assert split.keys() == alone.keys()
    for name, expected in alone.items():
        if name.startswith("ids"):
            np.testing.assert_array_equal(split[name], expected)  # greedy tokens too
        else:
            np.testing.assert_allclose(split[name], expected, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("split", SPLITS)
def test_tiny_model_split_equals_one_rank(tmp_path: Path, split: str) -> None:
    """Biases, a dense layer and a tied head come along."""
    save_tiny(tmp_path / "model", attention_bias=True, mlp_only_layers=[1], tie_word_embeddings=True)
    one_rank = sized_for(tiny_case(tmp_path, tmp_path / "model"), IDS, STEPS)
    alone = collect_logits(make_runner(one_rank, tmp_path), IDS, STEPS)
    case = write_case(tmp_path / "split.yaml", tmp_path / "model")
    assert_same(run_split(str(case), SPLITS[split], IDS, tmp_path / "split.npz"), alone)


@pytest.mark.parametrize("split", DEMO_SPLITS)
def test_demo_model_split_equals_one_rank(tmp_path: Path, split: str) -> None:
    case = load_case("demo", ["dtype=float32", "method=none"])
    ids = encode_prompts(case, Tokenizer(ROOT / case.model_path))
    alone = collect_logits(make_runner(sized_for(case, ids, STEPS), tmp_path), ids, STEPS)
    assert_same(run_split("demo", DEMO_SPLITS[split], ids, tmp_path / "split.npz"), alone)
