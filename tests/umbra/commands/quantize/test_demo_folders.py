"""The FP8 and AWQ folders of the MiniMax-M2 demo are what `umbra quantize` writes of it, and stay close to it."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor.config.load import load_case
from tests.tiny import make_runner
from text.tokenizer import Tokenizer
from umbra.commands.logits import prefill_logits, sized_for
from umbra.commands.quantize.awq import AwqTarget
from umbra.commands.quantize.convert import convert
from umbra.commands.quantize.fp8 import Fp8Target
from umbra.commands.quantize.source import Source
from umbra.files import ROOT, read_json

pytestmark = pytest.mark.slow

CHECKPOINTS = ROOT / "checkpoints"
DEMO, FP8, AWQ = (CHECKPOINTS / f"austen_minimax{ending}" for ending in ("", "_fp8", "_awq"))
HELD_OUT = (CHECKPOINTS / "austen_moe/held_out.txt").read_text()[:6000]


def test_the_fp8_folder_is_what_the_tool_writes(tmp_path: Path) -> None:
    convert(tmp_path / "out", Fp8Target(Source(DEMO), ()))
    written = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in written] == sorted(p.name for p in FP8.iterdir() if p.name != "README.md")
    for path in written:
        assert path.read_bytes() == (FP8 / path.name).read_bytes(), path.name


def test_the_awq_folder_was_made_of_the_demo() -> None:
    """From these weights and this text, in QuantTrio's layout; the search is repeated in other tests."""
    source, text = Source(DEMO), (CHECKPOINTS / "austen_moe_awq/calibration.txt").read_text()
    assert read_json(AWQ / "quantize_state.json") == {
        "quantization": AwqTarget(source, (), 128).quantisation,
        "source": source.digest(),
        "calibrate": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": 16384,
    }
    assert read_json(AWQ / "config.json")["quantization_config"] == AwqTarget(source, (), 128).quantisation


def logits(folder: Path, case_name: str) -> Tensor:
    case = load_case(case_name, ["keep_packed=false", "method=auto"])
    ids = Tokenizer(DEMO).encode(HELD_OUT, chat=False)[:1024]
    rows = [ids[start : start + 256] for start in range(0, len(ids), 256)]
    return torch.cat(prefill_logits(make_runner(sized_for(case, rows, 0), folder), rows)).log_softmax(-1)


def test_the_folders_stay_close_to_the_demo(tmp_path: Path) -> None:
    exact = logits(tmp_path, "demo_minimax")
    for case, most in (("demo_minimax_fp8", 0.01), ("demo_minimax_awq", 0.05)):
        ours = logits(tmp_path, case)
        assert 0 < float((exact.exp() * (exact - ours)).sum(-1).mean()) < most
