"""Perplexity and divergence: equal to transformers' and to plain float64, and hardly changed by quantisation."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from tests.command import umbra
from tests.tiny import save_tiny, save_tiny_of, write_case
from umbra.base.files import ROOT
from umbra.cli import execute
from umbra.commands import evaluate

pytestmark = pytest.mark.slow

TEXT = (ROOT / "checkpoints/austen_moe/held_out.txt").read_text()[:12000]


@pytest.fixture(scope="module")
def perplexity(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "text.txt").write_text(TEXT)
    figures = {}
    for method in ("none", "q8", "q4"):
        command = ["evaluate", "--case", "demo", "--set", f"method={method}", "--text", str(folder / "text.txt")]
        command += ["--json", str(folder / f"{method}.json"), "--window", "200", "--results", str(folder)]
        done = umbra(*command)
        assert done.returncode == 0, done.stderr
        data = json.loads((folder / f"{method}.json").read_text())
        assert f"perplexity {data['perplexity']:.3f}" in done.stdout
        figures[method] = data["perplexity"]
    return figures


def test_perplexity_equals_transformers(perplexity: dict[str, float]) -> None:
    from transformers import AutoTokenizer, Qwen3MoeForCausalLM

    folder = ROOT / "checkpoints/austen_moe"
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(TEXT).input_ids)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in ids.split(200):
            if len(row) > 1:
                logits = model(row[None]).logits[0, :-1]
                total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
                count += len(row) - 1
    assert count > 2500
    assert perplexity["none"] == pytest.approx(float(torch.tensor(total / count).exp()), rel=1e-3)


def test_quantisation_costs_little(perplexity: dict[str, float]) -> None:
    assert perplexity["q8"] < perplexity["none"] * 1.003
    assert perplexity["q4"] < perplexity["none"] * 1.03
    assert len(set(perplexity.values())) == 3  # they really ran in three formats


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (["evaluate", "--text", "nowhere.txt"], "--text nowhere.txt: not readable"),
        (["evaluate", "--text", "README.md", "--window", "5000"], "input_max_len + max_new_tokens: 5001 exceed"),
        (["evaluate", "--text", "README.md", "--against-set", "method=none"], "--against-set: belongs to --against"),
        (["logits", "--out", "x", "--ids", "1,99999", "--set", "world_size=2"], "99999"),
    ],
)
def test_bad_arguments_are_one_line(command: list[str], complaint: str) -> None:
    done = umbra(*command, "--case", "demo")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert complaint in done.stderr


LETTERS = "abcdefghijklmnopqrstuvwxyz ,.\n"
TINY_TEXT = "the quick brown fox jumps over the lazy dog, and so on.\n" * 3
WINDOW = 50


def save_letters(folder: Path, letters: str) -> None:
    """A tokenizer with a token for each letter."""
    tokenizer = Tokenizer(WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="."))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A case of a family, with its text beside it."""
    family = getattr(request, "param", "qwen3_moe")
    if family == "gpt_oss":
        save_tiny_of(tmp_path / "model", family)
    else:
        save_tiny(tmp_path / "model", moe_intermediate_size=32)
    save_letters(tmp_path / "model", LETTERS)
    (tmp_path / "text.txt").write_text(TINY_TEXT)
    (tmp_path / "scratch").mkdir()
    return str(write_case(tmp_path / "tiny.yaml", tmp_path / "model", model_name=family))


def command_against(folder: Path, case: str, overrides: list[str], *against: str) -> list[str]:
    command = ["evaluate", "--case", case, "--set", *overrides, "--against", *against]
    command += ["--text", str(folder / "text.txt"), "--window", str(WINDOW), "--batch", "2"]
    return [*command, "--json", str(folder / "figures.json")]


def run_against(folder: Path, case: str, overrides: list[str], *against: str) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder / "scratch"))
        patch.setattr(tempfile, "tempdir", None)  # what this process has found before
        return umbra(*command_against(folder, case, overrides, *against))


def figures_against(folder: Path, case: str, overrides: list[str], *against: str) -> tuple[dict[str, Any], str]:
    done = run_against(folder, case, overrides, *against)
    assert done.returncode == 0, done.stderr
    assert not [p for p in (folder / "scratch").iterdir() if "evaluate" in p.name]
    return json.loads((folder / "figures.json").read_text()), done.stdout


def distributions(folder: Path, case: str, method: str) -> torch.Tensor:
    """(positions, vocabulary), float64 log-probabilities by `umbra logits`."""
    ids = [LETTERS.index(letter) for letter in TINY_TEXT]
    rows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    text = ";".join(",".join(map(str, row)) for row in rows)
    out = str(folder / f"{method}.npz")
    done = umbra("logits", "--case", case, "--set", f"method={method}", "--ids", text, "--out", out)
    assert done.returncode == 0, done.stderr
    with np.load(out) as arrays:
        logits = np.concatenate([arrays[f"prefill_{i}"] for i in range(len(rows))]).astype(np.float64)
    return torch.from_numpy(logits).log_softmax(-1)


@contextmanager
def passes_here() -> Iterator[None]:
    """Passes run in this process, where only their figures matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "start_pass", lambda program: execute(program[2:]))  # after "-m umbra"
        yield


@pytest.mark.parametrize("tiny", ["qwen3_moe", "gpt_oss"], indirect=True)
def test_divergence_equals_float64(tiny: str, tmp_path: Path) -> None:
    p, q = distributions(tmp_path, tiny, "none"), distributions(tmp_path, tiny, "q4")
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    agreement = 100 * float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert kl > 1e-3  # the two do differ
    with passes_here():
        one_rank, said = figures_against(tmp_path, tiny, ["method=q4"], tiny, "--against-set", "method=none")
    assert one_rank["kl_divergence"] == pytest.approx(kl, rel=1e-4)
    assert one_rank["top1_agreement"] == pytest.approx(agreement)
    assert one_rank["positions"] == len(p) == len(TINY_TEXT)
    assert (one_rank["quantization"], one_rank["against"]["quantization"]) == ("q4", "none")
    assert said.splitlines()[-1].split()[-2:] == [f"{kl:.6f}", f"{agreement:.2f}"]


@pytest.mark.thorough
def test_ended_from_outside_leaves_nothing_behind(tiny: str, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    command = [sys.executable, "-m", "umbra", *command_against(tmp_path, tiny, ["method=none"], tiny)]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(scratch)}, stdout=subprocess.PIPE) as job:
        assert job.stdout
        assert job.stdout.readline().startswith(b"first tiny: its logits take ")
        assert [p.name for p in scratch.iterdir() if p.name.startswith("umbra-evaluate-")]
        job.terminate()
        assert job.wait(300) == 128 + signal.SIGTERM
    assert not list(scratch.iterdir())


def test_other_vocabularies_are_refused(tiny: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "other")
    save_letters(tmp_path / "other", LETTERS[::-1])
    other = str(write_case(tmp_path / "other.yaml", tmp_path / "other"))
    done = run_against(tmp_path, tiny, ["method=none"], other)
    assert done.returncode == 2
    assert "error: --against other: its vocabulary is not that of tiny" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list((tmp_path / "scratch").iterdir())
