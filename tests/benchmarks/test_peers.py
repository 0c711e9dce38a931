"""What the benchmarks beside other engines compute themselves, without those engines."""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import compare_moe, cpu_moe, machine
from benchmarks.moe_weights import Weights, random_weights, routed
from benchmarks.peer_engine import lengthened
from benchmarks.torch_int4_moe import TorchInt4Moe
from errors import UserError

pytestmark = pytest.mark.slow

SIZES = dict(EXPERTS=4, INNER=32, HIDDEN=64, TOP_K=2)


def saved(start: bytes, ids: tuple[int, ...], keys: np.ndarray, values: np.ndarray, transposed: bool) -> bytes:
    """The state of a sequence, from keys and values (layers, tokens, width) of 16 bits."""
    layers, tokens, width = keys.shape
    parts = [start, struct.pack("<I", tokens)]
    parts += [struct.pack(f"<iI{len(ids)}i", position, len(ids), *ids) for position in range(tokens)]
    parts.append(struct.pack("<II", transposed, layers))
    parts += [struct.pack("<iQ", 1, 2 * width) + k.tobytes() for k in keys]
    if transposed:
        parts += [struct.pack("<iII", 1, 2, width) + v.T.tobytes() for v in values]
    else:
        parts += [struct.pack("<iQ", 1, 2 * width) + v.tobytes() for v in values]
    return b"".join([*parts, b"rest"])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("start", "ids"), [(b"", ()), (b"mark, stream", (0,))])
def test_a_saved_sequence_is_made_longer(start: bytes, ids: tuple[int, ...], transposed: bool) -> None:
    keys, values = np.random.default_rng(0).integers(1 << 16, size=(2, 3, 4, 8), dtype=np.uint16)
    longer = lengthened(saved(start, ids, keys, values, transposed), len(start), 12)
    expected = saved(start, ids, np.tile(keys, (1, 3, 1)), np.tile(values, (1, 3, 1)), transposed)
    assert longer == expected


def test_ratios_are_of_neighbouring_turns() -> None:
    assert machine.ratios([1.0, 2.0, 4.0], [2.0, 3.0, 16.0]) == {"median": 2.0, "min": 1.5, "max": 4.0}


def test_rounds_that_others_disturb_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    others, calls = iter([0.0, 9.0, 9.0, 9.0, 9.0, 9.0]), list[int]()  # before and after each round: busy in the first
    monkeypatch.setattr(machine, "others_seconds", lambda: next(others))
    times = machine.take_turns({"a": lambda: calls.append(len(calls))}, seconds=1e-9, least=2)
    assert len(calls) == 1 + 1 + 2
    assert len(times["a"]) == 2


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr(compare_moe, name, size)
        monkeypatch.setattr(cpu_moe, name, size)


class Exact:
    """Stands for kt-kernel."""

    factor = 1.0

    def __init__(self, weights: Weights, *_: object):
        self.weights = weights

    def prepared(self, x: Tensor, weights: Tensor, ids: Tensor) -> Callable[[], Tensor]:
        return lambda: self.factor * compare_moe.exact_output(self.weights, x, weights, ids)


@pytest.fixture
def kt_kernel(sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(__version__="0", __cpu_variant__="none")
    replaced: dict[str, Any] = dict(KtMoe=Exact, library=lambda: library, thread_pool=lambda workers: None)
    for name, value in (replaced | dict(TOKENS=(1, 5), PAUSE=0.0)).items():
        monkeypatch.setattr(compare_moe, name, value)


def test_compare_moe_writes_its_rows(kt_kernel: None, tmp_path: Path) -> None:
    outputs = ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]
    compare_moe.main(["--threads", "1", "--seconds", "0", *outputs])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == [1, 5]
    assert rows[0]["experts"] == 2
    for row in rows:
        assert row["ours_ratio_median"] == 1
        assert 0 < row["ours_error"] < 0.03
        assert 0 < row["torch_error"] < 0.02
        assert row["group_error"] < 0.01
        for name in ("ours", "group", "row", "torch"):
            ratio = row["ours_ms"] / row[f"{name}_ms"]
            assert row[f"{name}_read_fraction"] == pytest.approx(row["ours_read_fraction"] * ratio)
    assert (tmp_path / "rows.png").stat().st_size > 0


def test_another_output_ends_the_comparison(kt_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for factor in (1.1, float("nan")):
        monkeypatch.setattr(Exact, "factor", factor)
        with pytest.raises(UserError, match="the outputs are not the layer's"):
            compare_moe.main(["--threads", "1", "--seconds", "0"])


def test_without_kt_kernel_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kt_kernel", None)
    with pytest.raises(UserError, match=r"pip install --no-deps --require-hashes -r \S+/compare-moe\.lock"):
        compare_moe.main(["--threads", "1"])


def test_all_formats_hold_the_same_weights(sizes: None) -> None:
    weights = random_weights(4, 32, 64)
    experts = compare_moe.filled_experts(weights)
    for name, parts in weights.items():
        for e, part in enumerate(parts):
            exact = part.floats()
            torch.testing.assert_close(experts.dequantised(e, name), exact, rtol=0, atol=0)
            torch.testing.assert_close(exact.bfloat16().float(), exact, rtol=0, atol=0)
            torch.testing.assert_close(exact.amax(1), 7 * part.scales[:, 0], rtol=0, atol=0)


def test_torchs_experts_are_the_layers(sizes: None) -> None:
    weights = random_weights(4, 32, 64)
    (x, of_experts, ids), *_ = cpu_moe.random_inputs(3)[0]
    exact = compare_moe.exact_output(weights, x, of_experts, ids)
    assert (TorchInt4Moe(weights).prepared(x, of_experts, ids)() - exact).norm() < 0.02 * exact.norm()


def test_each_token_has_the_sum_of_its_experts() -> None:
    x, ids = torch.tensor([[1.0], [10.0]]), torch.tensor([[0, 2], [2, 1]])
    out = routed(x, torch.tensor([[0.5, 0.25], [1.0, 2.0]]), ids, lambda e, rows: rows * (e + 1))
    assert out.tolist() == [[0.5 + 0.75], [30.0 + 40.0]]


def test_the_number_of_workers_is_that_of_the_faster_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"1": [3.0, 1.0, 2.0], "2": [1.0, 9.0, 1.0]}
    monkeypatch.setattr(compare_moe, "take_turns", lambda runs, *_: {name: times[name] for name in runs})
    layers = dict.fromkeys((1, 2), Exact({}))
    assert compare_moe.fastest(layers, [], 0) == 2
    assert compare_moe.fastest({1: layers[1]}, [], 0) == 1
