"""L2: experts chosen by softmax, or by sigmoid scores plus a bias, by fused ops and by plain ones; and mistakes in
them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from models.layers.experts import chosen
from ops import reference
from ops.ascend.cann import ALL_ABILITIES, Abilities, abilities
from ops.ascend.ops import AscendOps
from tests.ascend import npu_on_cpu  # noqa: F401 (registers)
from tests.ascend.engine import M2
from tests.ascend.on_cpu import ascend_on_cpu
from tests.ascend.test_numerics import logits, save

CPU, PLAIN = torch.device("cpu"), abilities(None)


def ops(can: Abilities = ALL_ABILITIES) -> AscendOps:
    return AscendOps(torch.bfloat16, CPU, "fusion_v2", can=can)


@pytest.mark.parametrize("experts", [256, 2049], ids=["fused", "plain"])
@pytest.mark.parametrize(("biased", "renormalise"), [(True, True), (False, True), (True, False)])
def test_as_the_reference_chooses(experts: int, biased: bool, renormalise: bool) -> None:
    torch.manual_seed(5)
    scores, bias = torch.randn(7, experts) * 2, 7 + 0.25 * torch.randn(experts) if biased else None
    weights, ids = chosen(ops().route_sigmoid(scores, bias, 8, renormalise))
    expected, best = reference.route_sigmoid(scores, bias, 8, renormalise)
    assert (weights.dtype, ids.dtype) == (torch.bfloat16, torch.int32)
    assert torch.equal(ids.long(), best)
    torch.testing.assert_close(weights.float(), expected, atol=0, rtol=2**-8)


@pytest.mark.parametrize("can", [ALL_ABILITIES, PLAIN], ids=["fused", "plain"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_as_the_reference_chooses_by_softmax(can: Abilities, renormalise: bool) -> None:
    torch.manual_seed(5)
    scores = torch.randn(7, 128) * 2
    weights, ids = chosen(ops(can).route_softmax(scores, 8, renormalise))
    expected, best = reference.route_softmax(scores, 8, renormalise)
    assert torch.equal(ids.long(), best)
    assert bool((weights.sum(-1) > 0.999).all()) == renormalise
    torch.testing.assert_close(weights.float(), expected, atol=0, rtol=1e-5)


def test_a_group_without_tokens_chooses_nothing() -> None:
    """In a prefill, a data-parallel group may have no prompt."""
    none = torch.randn(0, 128)
    for routed in (ops().route_softmax(none, 8, True), ops().route_sigmoid(none, None, 8, True)):
        weights, ids = chosen(routed)
        assert weights.shape == (0, 8)
        assert (ids.shape, ids.dtype) == ((0, 8), torch.int32)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of the fused op from here on."""
    real: Any = torch_npu.npu_moe_gating_top_k
    calls: list[dict[str, Any]] = []

    def called(**given: Any) -> Any:
        calls.append(given)
        return real(**given)

    monkeypatch.setattr(torch_npu, "npu_moe_gating_top_k", called)
    return calls


def test_a_softmax_is_renormalised_by_the_fused_op(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = noted(monkeypatch)
    scores = torch.randn(3, 128)
    for can, renormalise in ((PLAIN, True), (abilities("8.5.0"), True), (ALL_ABILITIES, False)):
        ops(can).route_softmax(scores, 4, renormalise)
    ops().route_softmax(torch.randn(3, 2049), 4, True)
    assert not calls
    ops().route_softmax(scores, 4, True)
    assert [(given["renorm"], given["norm_type"]) for given in calls] == [(1, 0)]


def test_which_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused op renormalises always, and takes 2048 experts at most."""
    calls = noted(monkeypatch)
    for experts, renormalise in ((256, False), (2049, True)):
        ops().route_sigmoid(torch.randn(3, experts), None, 4, renormalise)
    assert not calls
    ops().route_sigmoid(torch.randn(3, 2048), None, 4, True)
    assert len(calls) == 1


def test_a_bias_of_another_type_is_refused() -> None:
    with pytest.raises(RuntimeError, match="gating_top_k: a bias as x"):
        ops().route_sigmoid(torch.randn(3, 8), torch.zeros(8, dtype=torch.bfloat16), 2, True)


REAL = AscendOps.route_sigmoid


def test_a_model_in_bfloat16_chooses_by_float32_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(M2, tmp_path)
    seen = set()

    def noted(self: AscendOps, scores: Tensor, bias: Tensor, top_k: int, renormalise: bool) -> Any:
        seen.add((scores.dtype, bias.dtype))
        return REAL(self, scores, bias, top_k, renormalise)

    monkeypatch.setattr(AscendOps, "route_sigmoid", noted)
    logits(tmp_path, ascend_on_cpu("fusion_v2"), model_config={"dtype": "bfloat16"})
    assert seen == {(torch.float32, torch.float32)}
