"""A newcomer with a checkpoint of their own, as transformers writes it, goes by the README. Each command is a process
of its own in a folder elsewhere, at last one with a file of the name of a package here."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.ranks import free_port
from tests.tiny import save_tiny, save_tiny_m2
from umbra.base.files import ROOT

DEMO = ROOT / "checkpoints/austen_moe"


@pytest.mark.slow
@pytest.mark.beside
@pytest.mark.parametrize(
    ("save", "family"),
    [
        (partial(save_tiny, hidden_size=64, moe_intermediate_size=32), "qwen3_moe"),
        pytest.param(save_tiny_m2, "minimax_m2", marks=pytest.mark.thorough),
    ],
)
def test_one_s_own_model(tmp_path: Path, save: Callable[..., Any], family: str) -> None:
    save(tmp_path / "mine", False, vocab_size=4096, max_position_embeddings=600)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, tmp_path / "mine")
    (tmp_path / "mine/generation_config.json").write_text('{"do_sample": true, "temperature": 0.9, "top_k": 50}')
    (tmp_path / "text.txt").write_text((DEMO / "held_out.txt").read_text()[:3000])

    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "umbra", *words]

    def said(*words: str, answer: str = "") -> str:
        done = subprocess.run(command(*words), cwd=tmp_path, input=answer, capture_output=True, text=True, timeout=300)
        errors = [line for line in done.stderr.splitlines() if not line.startswith("quantizing layer ")]  # after 5 s
        assert (done.returncode, errors) == (0, []), done.stdout
        return done.stdout

    assert "KV cache" in said("plan", "mine", "--max-model-len", "300")
    shown = said("run", "mine", "--prompt", "Emma was", "--max-tokens", "5")
    lines = shown.splitlines()
    assert lines[0].startswith(f"running mine: {family}, ")
    assert lines[1].startswith("chosen for this machine: 4 sequences of up to 600 tokens (")
    assert "[0] Emma was\n" in shown
    assert "(5 tokens, length)" in shown
    assert "> " in said("chat", "./mine", "--max-tokens", "5", answer="Hello\n")
    assert "perplexity " in said("evaluate", "--case", "mine", "--text", "text.txt", "--window", "100")
    assert "wrote mine.yaml" in said("init", "mine", "--max-num-seqs", "3")
    quantised = said("quantize", "--model", "mine", "--out", "four", "--group", "32", "--calibrate", "text.txt")
    assert "wrote four" in quantised
    assert "[0] Emma was" in said("run", "four", "--prompt", "Emma was", "--max-tokens", "3")

    port = free_port()
    flags = ("--port", str(port), "--served-model-name", "my-model", "--max-model-len", "400")
    server = subprocess.Popen(command("serve", "mine.yaml", *flags), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        assert f"ready: my-model at http://127.0.0.1:{port}\n" in iter(server.stdout.readline, "")
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        (model,) = client.models.list()
        assert (model.id, model.to_dict()["max_model_len"]) == ("my-model", 400)
        answers = client.chat.completions.create(
            model="my-model", messages=[{"role": "user", "content": "Hello"}], n=3, max_tokens=8
        )
        assert len({choice.message.content for choice in answers.choices}) == 3  # they are sampled
        with pytest.raises(BadRequestError, match="can have at most 400"):
            client.completions.create(model="my-model", prompt="Emma " * 500)
    finally:
        server.terminate()
        server.wait(300)

    (tmp_path / "models.py").write_text("raise SystemExit('the wrong models.py')\n")
    program = """
from umbra import LLM
llm = LLM("mine", max_model_len=300, tensor_parallel_size=1)
(reply,) = llm.chat([{"role": "user", "content": "Hello"}])
print(reply.text == reply.outputs[0].text, len(reply.tokens) > 0)
"""
    (tmp_path / "own.py").write_text(program)
    done = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("True True\n"), done.stderr
