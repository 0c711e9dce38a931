"""The mixture that chooses its experts from scores, unmodified, in the twin."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fakes.ascend_c import Counts, Library
from tests.fakes.ascend_c.launch import launch
from tests.ops.vector_core.test_kernels import BOUND, worst_row
from tests.ops.vector_core.weights import random_weight, unnoticed
from umbra.ops import reference as interface
from umbra.ops.ascend.vector_core import reference

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
HIDDEN, INNER, GROUPS = 64, 32, (32, 32)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def mixture(
    scores: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    here: range | None = None,
    dtype: torch.dtype = BFLOAT,
    cores: int = 6,
    library: Library | None = None,
    float_sums: bool = False,
) -> tuple[Tensor, Tensor, Counts]:
    """y, its exact value, and the counts. Experts differ by far, so that a wrong choice is seen."""
    experts = len(here) if here else scores.shape[1]
    up = random_weight(experts, HIDDEN, 2 * INNER, 32, dtype, False)
    down = random_weight(experts, INNER, HIDDEN, 32, dtype, False, ordered=True)
    x = torch.randn(len(scores), HIDDEN).to(dtype)
    inputs, attributes = (x, *up, *down, scores, bias), (top_k, sigmoid, here.start if here else 0, *GROUPS)
    y, counts = launch("fused_moe_scores", *inputs, attributes=(*attributes, float_sums), cores=cores, library=library)
    return y, reference.compute("fused_moe_scores_w4a16", *inputs, *attributes, precise=True), counts


SIZES = [(1, 8, 128), (8, 8, 256), (3, 2, 5), (5, 3, 200), (2, 4, 512)]


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SIZES)
def test_scores(tokens: int, top_k: int, experts: int) -> None:
    """Softmax with scores of the type of x, sigmoids with scores in float, with a bias and without."""
    for dtype in (HALF, BFLOAT):
        y, expected, _ = mixture((torch.randn(tokens, experts) * 2).to(dtype), None, top_k, False, dtype=dtype)
        assert worst_row(y, expected) < BOUND[dtype]
    for bias in (None, 7 + torch.randn(experts)):
        y, expected, _ = mixture(torch.randn(tokens, experts) * 2, bias, top_k, True)
        assert worst_row(y, expected) < BOUND[BFLOAT], bias is None


def test_the_other_types_of_scores() -> None:
    assert worst_row(*mixture(torch.randn(3, 40), None, 4, False)[:2]) < BOUND[BFLOAT]
    y, expected, _ = mixture(torch.randn(3, 40).half(), torch.randn(40), 4, True, dtype=HALF, float_sums=True)
    assert worst_row(y, expected) < BOUND[HALF]


@pytest.mark.parametrize("here", [range(0, 16), range(24, 40)])
def test_experts_of_other_ranks_add_nothing(here: range) -> None:
    for sigmoid in (False, True):
        y, expected, _ = mixture(torch.randn(8, 40), None, 4, sigmoid, here)
        assert worst_row(y, expected) < BOUND[BFLOAT]
        assert expected.norm(dim=-1).count_nonzero()


@pytest.mark.parametrize("experts", [40, 256])
def test_of_equal_scores_the_first_are_chosen(experts: int) -> None:
    """As in ops/reference.py and in the kernels of the CPU."""
    scores = torch.randint(0, 3, (8, experts)).float()  # many are equal
    scores[0] = 1
    for sigmoid, bias in ((False, None), (True, None), (True, torch.zeros(experts))):
        y, expected, _ = mixture(scores, bias, 8, sigmoid)
        assert worst_row(y, expected) < BOUND[BFLOAT]
    assert interface.route_softmax(scores, 8, True)[1][0].tolist() == list(range(8))


def test_extreme_scores() -> None:
    infinity = float("inf")
    scores = torch.randn(6, 40)
    scores[0] = torch.linspace(-300, 300, 40)  # exponentials of the largest overflow, of others they are 0
    scores[1, 3:] = -infinity  # fewer finite scores than experts of a token
    scores[2] = 1e30
    scores[3] = -1e30
    scores[4, 5] = -infinity
    y, expected, _ = mixture(scores, None, 4, False)
    assert worst_row(y, expected) < BOUND[BFLOAT]
    y, expected, _ = mixture(scores[[0, 2, 4, 5]], torch.randn(40), 4, True)
    assert worst_row(y, expected) < BOUND[BFLOAT]
    y, expected, _ = mixture(scores[[3, 5]], torch.randn(40), 4, True)  # sigmoids that are all 0 have no quotients
    assert y[0].isnan().all()
    assert expected[0].isnan().all()
    assert y[1].isfinite().all()


@pytest.mark.parametrize("column", [0, 39])
def test_a_row_with_nan_is_nan_and_others_are_not(column: int) -> None:
    scores = torch.randn(4, 40)
    scores[1, column] = float("nan")
    odd = [1]
    for sigmoid in (False, True):
        if not sigmoid:  # a softmax has no value either if its largest score is infinite
            scores[2, column], odd = float("inf"), [1, 2]
        y, expected, _ = mixture(scores, None, 4, sigmoid)
        assert y[odd].isnan().all()
        assert expected[odd].isnan().all()
        even = [row for row in range(4) if row not in odd]
        assert worst_row(y[even], expected[even]) < BOUND[BFLOAT]
        scores[2, column], odd = 0.5, [1]


def test_each_core_reads_the_scores_once() -> None:
    _, _, counts = mixture(torch.randn(8, 256), torch.randn(256), 8, True, cores=5)
    assert (counts.buffers["scores"]["read"], counts.buffers["bias"]["read"]) == (5 * 8 * 256 * 4, 5 * 256 * 4)
    assert (counts.total["scalar_gm"], counts.waits) == (0, 1)


FILE = "umbra_choice.h"
MISTAKES = {  # what becomes what
    "a list is left out": "lists * (g + 1) / groups|lists * (g + 1) / groups - 1",
    "lists of another token": "sorted[(i * lists + from) * kPaired]|sorted[from * kPaired]",
    "merged lists of another token": "from[i * count * kPaired]|from[0]",
    "fewer than eight are merged": "lengths[i] = kMostChosen;|lengths[i] = kMostChosen - 1;",
    "ids of another rank": "static_cast<int32_t>(t.first)|0",
    "the best of another token": "i / t.topK * kPaired + i % t.topK * 2 + 1|i % t.topK * 2 + 1",
    "no largest score": "AscendC::Brcb(blocks, sums, 1, {1, 8});|AscendC::Duplicate(blocks, 0.0f, 64);",
    "the largest score of another token": "blocks[i * 8]|blocks",
    "the sum of all is left out": "Divide(chosen, parts, blocks);|;",
    "the sum of a vector is left out": "AscendC::Add(parts, parts, parts[left * 8], upper * 8);|;",
    "weights of another token": "i * pitch * 4|0",
    "more than the chosen are in the sum": "AscendC::WholeReduceSum<float>(sums, chosen, t.topK, t.tokens, 1, 1, 1);"
    "|AscendC::WholeReduceSum<float>(sums, chosen, 8, t.tokens, 1, 1, 1);",
    "not renormalised": "Divide(chosen, sums, blocks);|;",
    "weights without order": "chosen.GetValue(i / t.topK * 8 + i % t.topK)|chosen.GetValue(i)",
    "zeros after the scores": "AscendC::Duplicate(score.ReinterpretCast<uint32_t>(), kMinusInfinity, all);"
    "|AscendC::Duplicate(score, 0.0f, all);",
    "zeros after the biases": "AscendC::Duplicate(biases.ReinterpretCast<uint32_t>(), kMinusInfinity, pitch);"
    "|AscendC::Duplicate(biases, 0.0f, pitch);",
    "the bias is left out": "AscendC::Adds(biases, biasIn, 0.0f, t.scored);"
    "|AscendC::Duplicate(biases, 0.0f, t.scored);",
    "payloads repeat": "static_cast<int32_t>(4 * have)|static_cast<int32_t>(4 * have % 64)",
    "rows of scores are not padded": "Up(bytes, 32) / sizeof(V)|bytes / sizeof(V)",
    "a sigmoid of the other sign": "AscendC::Muls(good, score, -1.0f, all);|AscendC::Muls(good, score, 1.0f, all);",
    "no one in the sigmoid": "AscendC::Adds(good, good, 1.0f, all);|;",
    "sorted by sigmoids of one token": "AscendC::Add(score[i * pitch], good[i * pitch], biases, pitch);"
    "|AscendC::Add(score[i * pitch], good, biases, pitch);",
}
CASES = [  # tokens, k, experts, sigmoid, bias, scores' type, experts here
    (3, 3, 40, False, False, BFLOAT, None),
    (3, 3, 200, True, True, FLOAT, None),
    (3, 3, 36, True, True, FLOAT, range(2, 10)),
    (4, 4, 104, False, False, BFLOAT, None),
    (2, 8, 200, False, False, FLOAT, None),
]


def right(library: Library) -> bool:
    for number, (tokens, top_k, experts, sigmoid, biased, dtype, here) in enumerate(CASES):
        scores = (torch.randn(tokens, experts) * 3).to(dtype)
        bias = -7 + 3 * torch.randn(experts) if biased else None
        if number == 0:
            scores -= 200 * torch.arange(tokens)[:, None]
        elif number == 3:
            scores[1, 100] = float("nan")
        elif number == 4:
            scores[0, 64:72] = 30 + torch.rand(8)  # eight of one list
        y, expected, _ = mixture(scores, bias, top_k, sigmoid, here, library=library)
        if not torch.equal(y.isnan(), expected.isnan()):
            return False
        errors = (y.double() - expected).nan_to_num().norm(dim=-1) / expected.nan_to_num().norm(dim=-1).clamp(min=1e-9)
        if not errors.max() < BOUND[BFLOAT]:
            return False
    return True


def test_every_mistake_is_noticed(tmp_path: Path) -> None:
    mistakes = {name: (FILE, *mistake.partition("|")[::2]) for name, mistake in MISTAKES.items()}
    assert unnoticed(tmp_path, "fused_moe_scores", mistakes, right) == ["no mistake"]
