"""The arithmetic that benchmark vector_core_precision gives a model: that of the kernels, and what it costs."""

import pytest
import torch

from executor.config.load import load_case, model_folder
from ops.ascend.vector_core.planes import planes_of
from tests.fakes.ascend_c.launch import launch
from text.tokenizer import Tokenizer
from tools.benchmarks.vector_core_precision import TEXT, compare, in_runs

HALF = torch.float16


@pytest.mark.slow
def test_runs_are_those_of_the_kernel() -> None:
    """Where runs cancel each other the error of sums in half is far above that of rounding y, and the same in both."""
    torch.manual_seed(0)
    k, n = 2048, 64
    planes = planes_of(k, 32)
    x = torch.empty(2, k)
    x[:, planes.order()] = 1 - 2 * (torch.arange(k) // planes.lanes // 8 % 2).float()
    x = (x + torch.randn(2, k) / 64).to(HALF)
    nibbles = torch.randint(4, 8, (n, k))
    scales = torch.full(planes.scales_shape(n), 0.01, dtype=HALF)
    y, _ = launch("gemv", x, planes.pack(nibbles).contiguous(), scales, None, attributes=(32,))
    sums = in_runs(x, nibbles, planes).sum(-1) * scales[0, 0, 0].float()
    exact = x.float() @ nibbles.float().T * scales[0, 0, 0].float()
    assert (y - exact).norm() > 0.003 * exact.norm()
    assert (y - sums).norm() < 0.2 * (y - exact).norm()


@pytest.mark.slow
def test_sums_in_half_cost_little_beside_four_bits() -> None:
    """Of the demo model on 32 tokens. Its activations are not rounded here, so only sums differ."""
    case = load_case("demo", ["exe_mode=eager", "keep_packed=false", "dtype=float32"])
    found = compare(case, Tokenizer(model_folder(case)).encode(TEXT.read_text(), chat=False)[:32])
    assert 0 < found.by_sums < 0.01 * found.by_bits
    assert found.by_order < 1e-4 * found.by_bits
    assert found.flips[1] <= found.flips[0] < 0.5
    assert set(found.ratios) == {"128 -> 768", "512 -> 128", "gate and up", "down"}
    assert all(0.001 < ratio < 0.02 for ratio in found.ratios.values())
