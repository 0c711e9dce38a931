"""A model split over ranks gives the same results as on one rank."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families import ROWS
from tests.families.pictured import KINDS, save_pictured
from tests.families.splits import overrides_of
from tests.ranks import run_ranks
from tests.tiny import make_runner, write_case
from umbra.base.files import ROOT
from umbra.commands.logits import collect_logits, sized_for
from umbra.executor.config.load import load_case
from umbra.executor.run.prompts import encode_prompts
from umbra.models.tokenizers import tokenizer_in

pytestmark = pytest.mark.slow

STEPS = 4  # in which all but one sequence begin a page
IDS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(30, 53)), [2, 2], [60, 61, 62]]
Arrays = dict[str, np.ndarray]
MODELS = {model: (row, sizes) for row in ROWS.values() for model, (sizes, _) in row.splits.items()}
SPLITS = {model: splits.split() for row in ROWS.values() for model, (_, splits) in row.splits.items()}
SPLITS |= {"demo": ["tp2"], "demo_tp8": ["tp8"]}
PLACED = [split for split in SPLITS["m2"] if "copies" in split]
STILL = next(split for split in SPLITS["m2"] if "still" in split)
IN_FLOATS = ["dtype=float32", "method=none"]


def settings_of(split: str) -> list[str]:
    return [*IN_FLOATS, *(f"{key}={value}" for key, value in overrides_of(split).items())]


def is_thorough(model: str, split: str) -> bool:
    return overrides_of(split)["world_size"] > 2


def splits(*chosen: tuple[str, str]) -> list[Any]:
    """Returns `chosen`, pairs of a model and a split, as values of two parameters."""
    return [pytest.param(*pair, marks=[pytest.mark.thorough] * is_thorough(*pair)) for pair in chosen]


class Jobs:
    """One job for all splits with this number of ranks, or for the thorough ones, run when the first is needed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.cases, self.ids = {"demo": "demo", "demo_tp8": "demo_tp8"}, dict.fromkeys(MODELS, IDS)
        for name, (row, sizes) in MODELS.items():
            save_pictured(folder / name, row.name, **sizes) if row.name in KINDS else row.save(folder / name, **sizes)
            self.cases[name] = str(write_case(folder / f"{name}.yaml", folder / name, model_name=row.name))
        demo = load_case("demo", IN_FLOATS)
        self.ids["demo"] = self.ids["demo_tp8"] = encode_prompts(demo, tokenizer_in(ROOT / demo.model_path))
        self.alone, self.job = cache(self._alone), cache(self._job)

    def _alone(self, model: str) -> Arrays:
        case = sized_for(load_case(self.cases[model.removesuffix("_tp8")], IN_FLOATS), self.ids[model], STEPS)
        return collect_logits(make_runner(case, self.folder), self.ids[model], STEPS)

    def _job(self, world_size: int, thorough: bool) -> "subprocess.CompletedProcess[str]":
        jobs = [
            [f"{model}_{split}", self.cases[model], settings_of(split), self.ids[model]]
            for model, splits in SPLITS.items()
            for split in splits
            if (overrides_of(split)["world_size"], is_thorough(model, split)) == (world_size, thorough)
        ]
        path = self.folder / f"ranks{world_size}_{thorough}.json"
        path.write_text(json.dumps(jobs))
        program = ["tests/executor/run/logits_ranks.py", str(path), str(STEPS)]
        return run_ranks(self.folder, world_size, program)

    def split(self, model: str, name: str) -> Arrays:
        done = self.job(overrides_of(name)["world_size"], is_thorough(model, name))
        path = self.folder / f"{model}_{name}.npz"
        assert path.exists(), done.stdout + done.stderr
        assert done.returncode == 0, done.stdout + done.stderr
        with np.load(path) as arrays:
            return dict(arrays)

    def facts(self, model: str, name: str) -> dict[str, Any]:
        """Returns what happened to the experts of a split with slots for them."""
        self.split(model, name)
        facts: dict[str, Any] = json.loads((self.folder / f"{model}_{name}.json").read_text())
        return facts


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("splits"))


def assert_same(split: Arrays, alone: Arrays) -> None:
    assert split.keys() == alone.keys()
    for name, expected in alone.items():
        if name.startswith("ids"):
            np.testing.assert_array_equal(split[name], expected)  # greedy tokens too
        else:
            np.testing.assert_allclose(split[name], expected, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("model", "split"), splits(*((model, name) for model, of_model in SPLITS.items() for name in of_model))
)
def test_split_equals_one_rank(jobs: Jobs, model: str, split: str) -> None:
    assert_same(jobs.split(model, split), jobs.alone(model))


@pytest.mark.parametrize(("model", "split"), splits(("qwen3", "tp2"), ("qwen3", "tp4_moe2"), ("m2", "tp2")))
def test_shares_of_rows_change_no_bit(jobs: Jobs, model: str, split: str) -> None:
    """Over gloo, if ranks divide the tokens of a step: with padding, more than two ranks add in another order."""
    shared, whole = jobs.split(model, f"{split}_sp"), jobs.split(model, split)
    for name, expected in whole.items():
        np.testing.assert_array_equal(shared[name], expected, err_msg=name)


@pytest.mark.parametrize(("model", "split"), splits(*(("m2", name) for name in PLACED)))
def test_places_of_experts_change_no_bit(jobs: Jobs, model: str, split: str) -> None:
    """On two ranks or four, with copies or without, while experts move, in captured steps and in chunks."""
    placed, still = jobs.split(model, split), jobs.split(model, STILL)
    for name, expected in still.items():
        np.testing.assert_array_equal(placed[name], expected, err_msg=name)


@pytest.mark.parametrize(
    ("model", "split"), splits(*(("m2", split) for split in (STILL, *PLACED)), ("oss", "dp4_ep_copies3_graph"))
)
def test_experts_move_and_ranks_are_evened_out(jobs: Jobs, model: str, split: str) -> None:
    """A captured step stays as it is."""
    facts = jobs.facts(model, split)
    if split == STILL:
        assert facts == {"placements": [], "graphs": 0}
        return
    first, *_ = facts["placements"]
    assert first["steps"] == 1
    assert first["experts"] > 0
    assert first["nbytes"] > 0
    assert first["before"] > first["after"] >= 1
    assert facts["graphs"] == ("graph" in split)


@pytest.mark.thorough
def test_the_command_starts_its_ranks(jobs: Jobs, tmp_path: Path) -> None:
    """`umbra logits` of a case with two ranks starts itself on both."""
    text = ";".join(",".join(map(str, row)) for row in IDS)
    command = [sys.executable, "-m", "umbra", "logits", "--case", jobs.cases["qwen3"]]
    command += ["--set", *settings_of("tp2")]
    command += ["--ids", text, "--steps", str(STEPS), "--out", str(tmp_path / "split.npz")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(tmp_path / "split.npz") as arrays:
        assert_same(dict(arrays), jobs.alone("qwen3"))
