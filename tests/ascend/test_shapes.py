"""The tensors of a step that `--plan` counts are those that the Ascend ops make with torch_npu's meta functions."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ascend.engine import FLASH, GLM, GPT_OSS, M2, MINISTRAL3, PROLOG, QWEN2, QWEN3, V3, Family
from tests.variants import covering
from umbra.executor.plan.activations import CountedGroup, Ledger, batch_of
from umbra.executor.plan.kv_caches import attentions
from umbra.models.build import Build, Formats
from umbra.models.registry import model_class, read_config
from umbra.ops.ascend import moe
from umbra.ops.ascend.cann import ALL_ABILITIES
from umbra.ops.ascend.counted import AscendCosts
from umbra.ops.ascend.exchange import AscendExchange
from umbra.ops.ascend.layout import AscendLayout
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.counted import CountedExchange, CountedOps
from umbra.ops.formats import FORMATS, Format
from umbra.ops.interface import fixed
from umbra.ops.parallel.groups import Parallel, Shard

BF16 = torch.bfloat16
TWO = CountedGroup(0, 2)
SPLIT = Parallel(TWO, CountedGroup(), TWO, Shard(), Shard(0, 2), TWO, TWO)  # data-parallel attention, divided experts
TENSOR = Parallel(TWO, TWO, CountedGroup(), Shard(0, 2), Shard(), TWO, TWO)

WAYS = {"whole": (Parallel(), False), "split": (SPLIT, False), "exchanged": (SPLIT, True), "tensor": (TENSOR, False)}

# The plan counts the tensors between the kernels that fused ones replace.
UNTILED = replace(ALL_ABILITIES, tiled_cache=False, fused_swiglu=False, rounding_norm=False, prolog=False)


def counted(routing: str, ledger: Ledger) -> CountedOps:
    costs = partial(AscendCosts, routing=routing)
    return CountedOps(AscendLayout(BF16), BF16, 128, 8, costs, name=ledger.note)


@pytest.mark.parametrize(
    ("stored", "routed"),
    covering(
        [
            (QWEN3, None, 8),
            (QWEN3, Format("q4", 32), 2),
            (QWEN3, Format("w8a8", 32), 8),
            (M2, Format("q4", 32), 2),
            (QWEN2, None, 3),
            (GLM, Format("q4", 32), 2),
            (GPT_OSS, None, 2),
            (V3, None, 2),
            (PROLOG, None, 2),
            (FLASH, Format("q4", 32), 2),
            (MINISTRAL3, None, 2),
        ],
        [*((routing, "whole") for routing in moe.ROUTINGS), *(("fusion_v2", way) for way in list(WAYS)[1:])],
    ),
)
def test_as_much_is_alive_at_the_fullest_moment(
    tmp_path: Path, stored: tuple[Family, Format | None, int], routed: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (family, format, top_k), (routing, way) = stored, routed
    parallel, exchanged = WAYS[way]
    # The op rotates in place, which its meta function does not know.
    monkeypatch.setattr(torch_npu, "npu_apply_rotary_pos_emb", lambda query, key, **_: (query, key))
    sizes = {QWEN3: dict(mlp_only_layers=[0], intermediate_size=64, attention_bias=True)}.get(family, {})
    family.save(tmp_path / "model", **family.sizes | sizes | dict(num_experts_per_tok=top_k))
    config = read_config(tmp_path / "model", family.name)
    plain = FORMATS["bfloat16"]
    formats = Formats(plain, format or plain, plain)
    ledger = Ledger()

    def most(ops: Any, device: torch.device, tokens: int, sequences: int) -> int:
        exchange: Any = None
        if exchanged:  # rows of decode steps only
            of_npu = AscendExchange(ops, "group", 0, 2, config.expert_count, 4)
            exchange = CountedExchange(ops, 2, 4) if isinstance(ops, CountedOps) else of_npu
        model = model_class(family.name)(config, Build(ops, parallel, formats, BF16, device, 256, exchange=exchange))
        for layer in attentions(model):
            layer.bind(*(fixed(layer.new_cache(part, 6, 128, BF16, device)) for part in range(layer.tensors)))
        expanded = family in (V3, PROLOG, FLASH) and tokens > sequences
        batch = batch_of(ops, tokens, sequences, 2, 128, parallel.attn_dp.size, expanded=expanded).to(device)
        return ledger.fullest(model, model.forward, batch).nbytes

    for tokens, sequences in ((96, 3), (4, 4)):
        planned = most(counted(routing, ledger), torch.device("meta"), tokens, sequences)
        with FakeTensorMode():
            npu = torch.device("npu", 0)
            real = most(AscendOps(BF16, npu, routing, can=UNTILED), npu, tokens, sequences)
            tiled = most(AscendOps(BF16, npu, routing), npu, tokens, sequences)
        assert planned == real
        assert tiled <= real


@pytest.mark.parametrize("op", ["split_rms_norm", "route_sigmoid", "route_sigmoid without bias", "not renormalised"])
def test_an_op_of_minimax_m2_has_the_same_tensors(op: str) -> None:
    """Alone, since in a step another op has the fullest moment."""
    ledger = Ledger()

    def most(ops: Any, device: torch.device) -> int:
        q, k = (torch.empty(5, 96, dtype=BF16, device=device)[:, : 16 * n] for n in (4, 1))
        scores, bias = (torch.empty(*shape, device=device) for shape in ((5, 64), (64,)))
        steps: dict[str, Any] = {
            "split_rms_norm": lambda _: ops.split_rms_norm([q, k], [q[0], k[0]], [512, 128], 1e-6, lambda x: x),
            "route_sigmoid": lambda _: ops.route_sigmoid(scores, bias, 3, True),
            "route_sigmoid without bias": lambda _: ops.route_sigmoid(scores, None, 3, True),
            "not renormalised": lambda _: ops.route_sigmoid(scores, bias, 3, False),
        }
        return ledger.fullest(torch.nn.Identity(), steps[op], Any).nbytes  # type: ignore[arg-type]

    planned = most(counted("fusion_v2", ledger), torch.device("meta"))
    with FakeTensorMode():
        npu = torch.device("npu", 0)
        assert planned == most(AscendOps(BF16, npu, "fusion_v2"), npu)
