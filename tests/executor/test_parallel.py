"""A model split over ranks gives the same results as on one rank."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import run_ranks
from tests.tiny import EXPANDED, make_runner, save_pictured, save_tiny, save_tiny_m2, save_tiny_of, write_case
from umbra.base.files import ROOT
from umbra.commands.logits import collect_logits, sized_for
from umbra.executor.config.load import load_case
from umbra.executor.run.prompts import encode_prompts
from umbra.models.tokenizers import tokenizer_in

pytestmark = pytest.mark.slow

STEPS = 4  # in which all but one sequence begin a page
IDS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(30, 53)), [2, 2], [60, 61, 62]]
Arrays = dict[str, np.ndarray]
Splits = dict[str, dict[str, Any]]
QWEN3: Splits = {
    "tp2": dict(world_size=2),
    "tp4_moe_2x2": dict(world_size=4, moe_tp_size=2),
    "tp4_graph": dict(world_size=4, moe_tp_size=2, exe_mode="graph"),
    "dp4_tp2_moe_2x4": dict(world_size=8, attn_tp_size=2, moe_tp_size=2, batch_size=8),
    "dp4_moe_tp4": dict(world_size=4, attn_tp_size=1, batch_size=8),
    "tp2_sp": dict(world_size=2, sequence_parallel_tokens=1),
    "tp2_sp_row_by_row": dict(world_size=2, chunked_prefill_size=1, sequence_parallel_tokens=1),
    "tp4_moe_2x2_sp": dict(world_size=4, moe_tp_size=2, sequence_parallel_tokens=1),
    "tp8_sp": dict(world_size=8, sequence_parallel_tokens=1),  # 36 tokens and 4 of padding
    "dp4_sp": dict(world_size=4, attn_tp_size=1, batch_size=8, sequence_parallel_tokens=1),
    "tp4_sp_in_chunks": dict(world_size=4, chunked_prefill_size=5, sequence_parallel_tokens=3),
}
DEMO: Splits = {"tp2": dict(world_size=2)}
DEMO_TP8: Splits = {"as it is": dict(world_size=8)}
PLACED: Splits = {  # 16 experts in slots; the prefill and the third step count, others move a layer each
    "ep2_still": dict(world_size=2, expert_slots=8, rebalance_steps=0),
    "ep2_moved": dict(world_size=2, expert_slots=8, rebalance_steps=1),
    "ep2_copies_graph": dict(world_size=2, expert_slots=9, rebalance_steps=1, exe_mode="graph"),
    "ep4_copies": dict(world_size=4, expert_slots=6, rebalance_steps=1),
    "ep4_copies_graph_in_chunks": dict(
        world_size=4, expert_slots=5, rebalance_steps=1, exe_mode="graph", chunked_prefill_size=5
    ),
}
# The official 48 query and 8 KV heads: of 16 ranks, two hold copies of each KV head.
M2: Splits = {
    "tp2": dict(world_size=2),
    "tp2_sp": dict(world_size=2, sequence_parallel_tokens=1),
    "dp2_ep2": dict(world_size=2, attn_tp_size=1, moe_tp_size=1),
    "dp2_graph": dict(world_size=2, attn_tp_size=1, exe_mode="graph"),
    "tp4_moe_2x2": dict(world_size=4, moe_tp_size=2),
    "tp4_ep4_graph": dict(world_size=4, moe_tp_size=1, exe_mode="graph"),
    "dp2_tp2_ep4_graph": dict(world_size=4, attn_tp_size=2, moe_tp_size=1, exe_mode="graph"),
    "tp4_graph_sp": dict(world_size=4, exe_mode="graph", sequence_parallel_tokens=1),
    "dp2_tp2_sp_in_chunks": dict(world_size=4, attn_tp_size=2, chunked_prefill_size=5, sequence_parallel_tokens=1),
    "tp8_ep8_graph": dict(world_size=8, moe_tp_size=1, exe_mode="graph"),
    "dp2_tp4_moe_4x2": dict(world_size=8, attn_tp_size=4, moe_tp_size=4),
    **{name: dict(attn_tp_size=1, moe_tp_size=1, **sizes) for name, sizes in PLACED.items()},
    "tp16": dict(world_size=16),
}
M2_FEW_KV: Splits = {  # two KV heads, of which several ranks hold copies
    "tp4": dict(world_size=4),
    "tp4_graph": dict(world_size=4, exe_mode="graph"),
    "dp2_tp4": dict(world_size=8, attn_tp_size=4),
}
SHARED: Splits = {  # a shared expert: its parts join sums of all rows, of shares of rows, or none
    "tp2": dict(world_size=2),
    "dp2_ep2_graph": dict(world_size=2, attn_tp_size=1, moe_tp_size=1, exe_mode="graph"),
    "ep2_copies_graph": dict(
        world_size=2, attn_tp_size=1, moe_tp_size=1, expert_slots=5, rebalance_steps=1, exe_mode="graph"
    ),
    "tp4_moe_2x2_graph_sp": dict(world_size=4, moe_tp_size=2, exe_mode="graph", sequence_parallel_tokens=1),
    "dp2_tp2_ep4": dict(world_size=4, attn_tp_size=2, moe_tp_size=1),
    "dp2_tp2_sp_in_chunks": dict(world_size=4, attn_tp_size=2, chunked_prefill_size=5, sequence_parallel_tokens=1),
    "dp2_tp4_moe_2x4": dict(world_size=8, attn_tp_size=4, moe_tp_size=2),
}
OSS: Splits = {  # biases once, sinks by heads; the bias after a row split and that of downs by one rank of several
    "tp2": dict(world_size=2),
    "dp2_graph": dict(world_size=2, attn_tp_size=1, exe_mode="graph"),
    "dp2_ep2": dict(world_size=2, attn_tp_size=1, moe_tp_size=1),
    "ep4_copies_graph": dict(
        world_size=4, attn_tp_size=1, moe_tp_size=1, expert_slots=3, rebalance_steps=1, exe_mode="graph"
    ),
    "tp4_moe_2x2_graph_sp": dict(world_size=4, moe_tp_size=2, exe_mode="graph", sequence_parallel_tokens=1),
    "dp2_tp2_ep4_in_chunks": dict(world_size=4, attn_tp_size=2, moe_tp_size=1, chunked_prefill_size=5),
    "tp8": dict(world_size=8),
    "dp2_tp4_moe_2x4_sp": dict(world_size=8, attn_tp_size=4, moe_tp_size=2, sequence_parallel_tokens=1),
}
NEXT: Splits = {  # from eight ranks on, several have copies of each of four key heads
    "tp2": dict(world_size=2),
    "tp4_moe_2x2_graph_sp": dict(world_size=4, moe_tp_size=2, exe_mode="graph", sequence_parallel_tokens=1),
    "tp8": dict(world_size=8),
    "tp16_graph": dict(world_size=16, exe_mode="graph"),
}
QWEN35: Splits = {
    "tp2_sp_in_chunks": dict(world_size=2, chunked_prefill_size=5, sequence_parallel_tokens=1),
    "dp2_ep2_graph": dict(world_size=2, attn_tp_size=1, moe_tp_size=1, exe_mode="graph"),
    "dp2_tp2_ep4_in_chunks": dict(world_size=4, attn_tp_size=2, moe_tp_size=1, chunked_prefill_size=5),
    "ep4_copies_graph": dict(
        world_size=4, attn_tp_size=1, moe_tp_size=1, expert_slots=3, rebalance_steps=1, exe_mode="graph"
    ),
    "dp2_tp4_moe_2x4": dict(world_size=8, attn_tp_size=4, moe_tp_size=2),
}
LATENTS = SHARED | {"tp8": dict(world_size=8)}  # heads are divided, latents are not
SPLITS = {
    "v3": LATENTS,
    "v2": {"tp2": LATENTS["tp2"]},
    "next": NEXT,
    "qwen35": QWEN35,
    "qwen2": SHARED,
    "glm": SHARED,
    "oss": OSS,
    "qwen3": QWEN3,
    "m2": M2,
    "m2_few_kv": M2_FEW_KV,
    "demo": DEMO,
    "demo_tp8": DEMO_TP8,
}
USUAL_OF_FOUR = {  # the other splits over more than two ranks are thorough ones
    ("qwen3", "tp4_moe_2x2"),
    ("qwen3", "tp4_moe_2x2_sp"),
    ("oss", "dp2_tp2_ep4_in_chunks"),
    ("m2", "ep4_copies"),
}
M2_SIZES = dict(hidden_size=64, head_dim=8, rotary_dim=4, num_hidden_layers=2, initializer_range=0.15)
HEADS = dict(num_hidden_layers=4, num_attention_heads=16, head_dim=16, linear_num_key_heads=4)
MODELS: dict[str, Callable[[Path], object]] = {
    # Biases, a dense layer and a tied head come along.
    "qwen3": lambda folder: save_tiny(folder, attention_bias=True, mlp_only_layers=[1], tie_word_embeddings=True),
    "qwen2": lambda folder: save_tiny_of(folder, "qwen2_moe"),
    "next": lambda folder: save_tiny_of(folder, "qwen3_next", **HEADS, linear_num_value_heads=16),
    "qwen35": lambda folder: save_pictured(folder, **HEADS, linear_num_value_heads=8),
    # Three and five groups of 32 columns on two ranks and four.
    "v3": lambda folder: save_tiny_of(folder, "deepseek_v3", **EXPANDED),
    "v2": lambda folder: save_tiny_of(folder, "deepseek_v2", q_lora_rank=None),
    "glm": lambda folder: save_tiny_of(folder, "glm4_moe", moe_intermediate_size=48, intermediate_size=160),
    "oss": lambda folder: save_tiny_of(folder, "gpt_oss", num_hidden_layers=2),
    "m2": lambda folder: save_tiny_m2(folder, **M2_SIZES, num_attention_heads=48, num_key_value_heads=8),
    "m2_few_kv": lambda folder: save_tiny_m2(folder, **M2_SIZES, num_attention_heads=16, num_key_value_heads=2),
}
IN_FLOATS = ["dtype=float32", "method=none"]


def overrides_of(split: dict[str, Any]) -> list[str]:
    return [*IN_FLOATS, *(f"{key}={value}" for key, value in split.items())]


def is_thorough(model: str, split: str) -> bool:
    return SPLITS[model][split]["world_size"] > 2 and (model, split) not in USUAL_OF_FOUR


def splits(*chosen: tuple[str, str]) -> list[Any]:
    """Returns `chosen`, pairs of a model and a split, as values of two parameters."""
    return [pytest.param(*pair, marks=[pytest.mark.thorough] * is_thorough(*pair)) for pair in chosen]


class Jobs:
    """One job for all splits with this number of ranks, or for the thorough ones, run when the first is needed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.cases, self.ids = {"demo": "demo", "demo_tp8": "demo_tp8"}, dict.fromkeys(MODELS, IDS)
        for name, save in MODELS.items():
            save(folder / name)
            kind = json.loads((folder / name / "config.json").read_text())["model_type"]
            self.cases[name] = str(write_case(folder / f"{name}.yaml", folder / name, model_name=kind))
        demo = load_case("demo", IN_FLOATS)
        self.ids["demo"] = self.ids["demo_tp8"] = encode_prompts(demo, tokenizer_in(ROOT / demo.model_path))
        self.alone, self.job = cache(self._alone), cache(self._job)

    def _alone(self, model: str) -> Arrays:
        case = sized_for(load_case(self.cases[model.removesuffix("_tp8")], IN_FLOATS), self.ids[model], STEPS)
        return collect_logits(make_runner(case, self.folder), self.ids[model], STEPS)

    def _job(self, world_size: int, thorough: bool) -> "subprocess.CompletedProcess[str]":
        jobs = [
            [f"{model}_{name}", self.cases[model], overrides_of(sizes), self.ids[model]]
            for model, splits in SPLITS.items()
            for name, sizes in splits.items()
            if (sizes["world_size"], is_thorough(model, name)) == (world_size, thorough)
        ]
        path = self.folder / f"ranks{world_size}_{thorough}.json"
        path.write_text(json.dumps(jobs))
        program = ["tests/executor/run/logits_ranks.py", str(path), str(STEPS)]
        return run_ranks(self.folder, world_size, program)

    def split(self, model: str, name: str) -> Arrays:
        done = self.job(SPLITS[model][name]["world_size"], is_thorough(model, name))
        path = self.folder / f"{model}_{name}.npz"
        assert path.exists(), done.stdout + done.stderr
        assert done.returncode == 0, done.stdout + done.stderr
        with np.load(path) as arrays:
            return dict(arrays)

    def facts(self, model: str, name: str) -> dict[str, Any]:
        """Returns what happened to the experts of a split with slots for them."""
        self.split(model, name)
        found: dict[str, Any] = json.loads((self.folder / f"{model}_{name}.json").read_text())
        return found


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


@pytest.mark.parametrize(("model", "split"), splits(("qwen3", "tp2"), ("qwen3", "tp4_moe_2x2"), ("m2", "tp2")))
def test_shares_of_rows_change_no_bit(jobs: Jobs, model: str, split: str) -> None:
    """Over gloo, if ranks divide the tokens of a step: with padding, more than two ranks add in another order."""
    shared, whole = jobs.split(model, f"{split}_sp"), jobs.split(model, split)
    for name, expected in whole.items():
        np.testing.assert_array_equal(shared[name], expected, err_msg=name)


@pytest.mark.parametrize(("model", "split"), splits(*(("m2", name) for name in PLACED if name != "ep2_still")))
def test_places_of_experts_change_no_bit(jobs: Jobs, model: str, split: str) -> None:
    """On two ranks or four, with copies or without, while experts move, in captured steps and in chunks."""
    placed, still = jobs.split(model, split), jobs.split(model, "ep2_still")
    for name, expected in still.items():
        np.testing.assert_array_equal(placed[name], expected, err_msg=name)


@pytest.mark.parametrize(("model", "split"), splits(*(("m2", split) for split in PLACED), ("oss", "ep4_copies_graph")))
def test_experts_move_and_ranks_are_evened_out(jobs: Jobs, model: str, split: str) -> None:
    """A captured step stays as it is."""
    facts = jobs.facts(model, split)
    if split == "ep2_still":
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
    command += ["--set", *overrides_of(QWEN3["tp2"])]
    command += ["--ids", text, "--steps", str(STEPS), "--out", str(tmp_path / "split.npz")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(tmp_path / "split.npz") as arrays:
        assert_same(dict(arrays), jobs.alone("qwen3"))
