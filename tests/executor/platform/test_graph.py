"""Capture and replay on the CPU: the same results as op by op, and no computation that is silently not captured."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import make_runner, save_tiny, tiny_case
from umbra.commands.logits import collect_logits
from umbra.ops import load_ops
from umbra.ops.cpu import engine

cpu = load_ops("cpu")
PROMPTS = [("a", [5, 17, 3]), ("b", [7]), ("c", list(range(30, 53))), ("d", [11, 12]), ("e", [90, 3, 3, 8])]


@pytest.mark.parametrize(("method", "kv_dtype"), [("none", "auto"), ("q8", "bfloat16"), ("q4", "int8")])
def test_replayed_logits_are_the_eager_ones(tmp_path: Path, method: str, kv_dtype: str) -> None:
    """Bit for bit: both run the same functions in the same order."""
    save_tiny(
        tmp_path / "model", moe_intermediate_size=32, mlp_only_layers=[0], attention_bias=True, intermediate_size=64
    )
    arrays = []
    for mode in ("eager", "graph"):
        formats: dict[str, Any] = {"quantization": {"method": method}, "cache_config": {"kv_dtype": kv_dtype}}
        case = tiny_case(tmp_path, tmp_path / "model", exe_mode=mode, **formats)
        arrays.append(collect_logits(make_runner(case, tmp_path), [ids for _, ids in PROMPTS[:4]], steps=20))
    for name, eager in arrays[0].items():
        np.testing.assert_array_equal(arrays[1][name], eager)


def test_what_is_not_recorded_is_refused_by_name() -> None:
    x, weight, tape = torch.randn(3, 8), torch.ones(4), engine.Tape()
    with pytest.raises(RuntimeError, match="aten::add cannot be captured"), tape.capture():
        cpu.rms_norm(x + 1, torch.ones(8), 1e-6)
    with pytest.raises(RuntimeError, match="aten::index cannot be captured"), tape.capture():
        x[torch.tensor([0, 2])]
    with pytest.raises(RuntimeError, match="aten::mul_ cannot be captured"), tape.capture():
        x.mul_(2)
    with tape.capture():  # views are free
        cpu.rms_norm(x.view(6, 4)[1:5], weight, 1e-6)
    cpu.rms_norm(x + 1, torch.ones(8), 1e-6)  # outside of a capture nothing is refused


@pytest.mark.parametrize("torch_mode", [torch.no_grad, torch.inference_mode])
def test_copies_are_captured_on_one_rank_as_on_several(torch_mode: Callable[[], AbstractContextManager[None]]) -> None:
    x, tape = torch.randn(3, 8), engine.Tape()
    with torch_mode(), tape.capture():
        joined = torch.cat([x, x])
        turned = x.T.flatten()  # a reshape that copies is no view
    assert len(tape.records) == 2
    x.copy_(torch.randn(3, 8))
    with torch_mode():
        tape.replay()
    assert torch.equal(joined, torch.cat([x, x]))
    assert torch.equal(turned, x.T.flatten())


def test_ops_that_a_host_node_calls_are_not_recorded() -> None:
    """They have tensors of their own in each replay."""
    x, weight, tape = torch.randn(3, 8), torch.rand(8), engine.Tape()
    with tape.capture():
        middle = cpu.rms_norm(x, weight, 1e-6)
        engine.host(lambda: middle.copy_(cpu.silu_mul(torch.cat([middle, middle], 1))))
        out = cpu.rms_norm(middle, weight, 1e-6)
    assert len(tape.records) == 3
    x.copy_(torch.randn(3, 8))
    tape.replay()
    once = cpu.rms_norm(x, weight, 1e-6)
    assert torch.equal(out, cpu.rms_norm(cpu.silu_mul(torch.cat([once, once], 1)), weight, 1e-6))
