"""L2: experts chosen by softmax, or by sigmoid scores plus a bias, by fused ops and by plain ones."""

from typing import Any

import pytest
import torch
import torch_npu

from tests.ascend import npu_on_cpu  # noqa: F401 (registers)
from umbra.models.layers.experts import chosen
from umbra.ops import reference
from umbra.ops.ascend.cann import ALL_ABILITIES, Abilities, abilities
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.interface import Groups

CPU, PLAIN = torch.device("cpu"), abilities(None)
SIGMOID_MOST = 2048  # experts that the fused op takes


def ops(can: Abilities = ALL_ABILITIES, dtype: torch.dtype = torch.bfloat16) -> AscendOps:
    return AscendOps(dtype, CPU, "fusion_v2", can=can)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of the fused op."""
    real: Any = torch_npu.npu_moe_gating_top_k
    calls: list[dict[str, Any]] = []

    def called(**given: Any) -> Any:
        calls.append(given)
        return real(**given)

    monkeypatch.setattr(torch_npu, "npu_moe_gating_top_k", called)
    return calls


@pytest.mark.parametrize("experts", [SIGMOID_MOST, SIGMOID_MOST + 1])
@pytest.mark.parametrize(("biased", "renormalise"), [(True, True), (False, True), (True, False)])
def test_as_the_reference_chooses(fused: list[Any], experts: int, biased: bool, renormalise: bool) -> None:
    """The fused op renormalises always."""
    torch.manual_seed(5)
    scores, bias = torch.randn(7, experts) * 2, 7 + 0.25 * torch.randn(experts) if biased else None
    weights, ids = chosen(ops().route_sigmoid(scores, bias, 8, renormalise))
    expected, best = reference.route_sigmoid(scores, bias, 8, renormalise)
    assert (weights.dtype, ids.dtype) == (torch.bfloat16, torch.int32)
    assert torch.equal(ids.long(), best)
    torch.testing.assert_close(weights.float(), expected, atol=0, rtol=2**-8)
    assert len(fused) == (renormalise and experts == SIGMOID_MOST)


@pytest.mark.parametrize("can", [ALL_ABILITIES, PLAIN, abilities("8.5.0")], ids=["fused", "plain", "8.5"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_as_the_reference_chooses_by_softmax(fused: list[Any], can: Abilities, renormalise: bool) -> None:
    torch.manual_seed(5)
    scores = torch.randn(7, 128) * 2
    weights, ids = chosen(ops(can, torch.float32).route_softmax(scores, 8, renormalise))
    expected, best = reference.route_softmax(scores, 8, renormalise)
    assert torch.equal(ids.long(), best)
    assert bool((weights.sum(-1) > 0.999).all()) == renormalise
    torch.testing.assert_close(weights.float(), expected, atol=0, rtol=1e-5)
    assert [(given["renorm"], given["norm_type"]) for given in fused] == [(1, 0)] * (
        renormalise and can is ALL_ABILITIES
    )


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("experts", "groups", "fused_ops"),
    [
        (64, None, 1),
        (256, Groups(8, 4, 2), 1),
        (160, Groups(8, 3, 1), 1),
        (520, Groups(65, 20, 2), 0),  # in multiples of 32 they would be more than 2048
    ],
)
def test_groups_and_scales(
    fused: list[Any], experts: int, groups: Groups | None, fused_ops: int, renormalise: bool
) -> None:
    torch.manual_seed(3)
    scores, bias = torch.randn(7, experts) * 2, -5 + torch.randn(experts)
    rest = 6, renormalise, 2.5, groups
    for name, of, count in (("route_sigmoid", (scores, bias), renormalise), ("route_softmax", (scores,), True)):
        weights, ids = chosen(getattr(ops(), name)(*of, *rest))
        wanted = getattr(reference, name)(*of, *rest)
        assert torch.equal(ids.long(), wanted[1])
        assert (weights.dtype, ids.dtype) == (torch.bfloat16, torch.int32)
        torch.testing.assert_close(weights.float(), wanted[0], atol=0, rtol=2**-7)
        assert len(fused) == (fused_ops and count)
        fused.clear()


def test_a_group_without_tokens_chooses_nothing() -> None:
    """In a prefill, a data-parallel group may have no prompt."""
    none = torch.randn(0, 128)
    for routed in (ops().route_softmax(none, 8, True), ops().route_sigmoid(none, None, 8, True)):
        weights, ids = chosen(routed)
        assert weights.shape == (0, 8)
        assert (ids.shape, ids.dtype) == ((0, 8), torch.int32)
