"""A model split over ranks gives the same results as on one rank, in real jobs that are started as a user does."""

import json
import subprocess
import sys
from functools import cache
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

pytestmark = pytest.mark.slow

STEPS = 6
IDS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(30, 53)), [2, 2], [60, 61, 62]]
Arrays = dict[str, np.ndarray]
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
IN_FLOATS = ["dtype=float32", "method=none"]


def overrides_of(split: dict[str, Any]) -> list[str]:
    return [*IN_FLOATS, *(f"{key}={value}" for key, value in split.items())]


class Jobs:
    """One job for all splits with this number of ranks, run when the first of them is needed."""

    def __init__(self, folder: Path):
        self.folder = folder
        # Biases, a dense layer and a tied head come along.
        save_tiny(folder / "model", attention_bias=True, mlp_only_layers=[1], tie_word_embeddings=True)
        self.tiny = str(write_case(folder / "split.yaml", folder / "model"))
        demo = load_case("demo", IN_FLOATS)
        self.demo_ids = encode_prompts(demo, Tokenizer(ROOT / demo.model_path))
        self.tiny_alone, self.demo_alone, self.job = cache(self._tiny_alone), cache(self._demo_alone), cache(self._job)

    def _tiny_alone(self) -> Arrays:
        one_rank = sized_for(tiny_case(self.folder, self.folder / "model"), IDS, STEPS)
        return collect_logits(make_runner(one_rank, self.folder), IDS, STEPS)

    def _demo_alone(self) -> Arrays:
        case = sized_for(load_case("demo", IN_FLOATS), self.demo_ids, STEPS)
        return collect_logits(make_runner(case, self.folder), self.demo_ids, STEPS)

    def _job(self, world_size: int) -> "subprocess.CompletedProcess[str]":
        jobs = [
            [f"{kind}_{name}", case, overrides_of(split), ids]
            for kind, case, splits, ids in (
                ("tiny", self.tiny, SPLITS, IDS),
                ("demo", "demo", DEMO_SPLITS, self.demo_ids),
            )
            for name, split in splits.items()
            if split["world_size"] == world_size
        ]
        path = self.folder / f"ranks{world_size}.json"
        path.write_text(json.dumps(jobs))
        program = ["tests/executor/job/logits_ranks.py", str(path), str(STEPS)]
        start = f"""
from errors import run_main
from executor.config.load import load_case
from executor.job.launch import launch
run_main(lambda argv: launch(load_case({self.tiny!r}, ["world_size={world_size}"]), {program!r}))
"""
        return subprocess.run([sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True, timeout=300)

    def split(self, name: str, split: dict[str, Any]) -> Arrays:
        done = self.job(split["world_size"])
        path = self.folder / f"{name}.npz"
        assert path.exists(), done.stdout + done.stderr
        assert done.returncode == 0, done.stdout + done.stderr
        with np.load(path) as arrays:
            return dict(arrays)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("splits"))


def assert_same(split: Arrays, alone: Arrays) -> None:
    assert split.keys() == alone.keys()
    for name, expected in alone.items():
        if name.startswith("ids"):
            np.testing.assert_array_equal(split[name], expected)  # greedy tokens too
        else:
            np.testing.assert_allclose(split[name], expected, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("split", SPLITS)
def test_tiny_model_split_equals_one_rank(jobs: Jobs, split: str) -> None:
    assert_same(jobs.split(f"tiny_{split}", SPLITS[split]), jobs.tiny_alone())


@pytest.mark.parametrize("split", DEMO_SPLITS)
def test_demo_model_split_equals_one_rank(jobs: Jobs, split: str) -> None:
    assert_same(jobs.split(f"demo_{split}", DEMO_SPLITS[split]), jobs.demo_alone())


def test_the_command_starts_its_ranks(jobs: Jobs, tmp_path: Path) -> None:
    """`umbra logits` of a case with two ranks starts itself on both."""
    text = ";".join(",".join(map(str, row)) for row in IDS)
    command = [sys.executable, "-m", "umbra", "logits", "--case", jobs.tiny, "--set", *overrides_of(SPLITS["tp2"])]
    command += ["--ids", text, "--steps", str(STEPS), "--out", str(tmp_path / "split.npz")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(tmp_path / "split.npz") as arrays:
        assert_same(dict(arrays), jobs.tiny_alone())
