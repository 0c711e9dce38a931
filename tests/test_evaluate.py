"""Perplexity: equal to transformers', and barely touched by quantisation."""

import json
import subprocess
import sys

import pytest
import torch

from executor.cases import ROOT

TEXT = (ROOT / "checkpoints/austen_moe/held_out.txt").read_text()[:24000]


@pytest.fixture(scope="module")
def perplexity(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "text.txt").write_text(TEXT)
    figures = {}
    for method in ("none", "q8", "q4"):
        command = [sys.executable, "tools/evaluate.py", "--case", "demo", "--set", f"method={method}"]
        command += ["--text", str(folder / "text.txt"), "--json", str(folder / f"{method}.json"), "--window", "200"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
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
    assert count > 5000
    assert perplexity["none"] == pytest.approx(float(torch.tensor(total / count).exp()), rel=1e-3)


def test_quantisation_costs_little(perplexity: dict[str, float]) -> None:
    assert perplexity["q8"] < perplexity["none"] * 1.003
    assert perplexity["q4"] < perplexity["none"] * 1.03
    assert len(set(perplexity.values())) == 3  # they really ran in three formats


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--text", "nowhere.txt"], "--text nowhere.txt: not readable"),
        (["--text", "README.md", "--window", "1"], "--window 1 must be at least 2"),
        (["--text", "README.md", "--window", "5000"], "input_max_len + max_new_tokens: 5001 exceed"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], complaint: str) -> None:
    command = [sys.executable, "tools/evaluate.py", "--case", "demo", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
