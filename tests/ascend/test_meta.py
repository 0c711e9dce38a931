"""L1: the whole model under FakeTensorMode on the npu device. The real meta functions are called for every op, and the
resulting shapes and types are right. ops/ascend checks itself what these functions do not check."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ascend.engine import FLASH, GLM, GPT_OSS, LLAMA, M2, MINISTRAL3, QWEN2, QWEN3, V2, V3, Family
from umbra.base.errors import UserError
from umbra.executor.engine.memory.pages import Holding, PagePool
from umbra.executor.engine.schedule.request import Request
from umbra.executor.engine.schedule.sequence import new_sequence
from umbra.executor.engine.step.batching import Packer, StepShape
from umbra.executor.plan.activations import CountedGroup
from umbra.models.batch import Batch
from umbra.models.build import Build, Formats
from umbra.models.causal_lm import CausalLM
from umbra.models.layers.attention import PagedCache
from umbra.models.registry import model_class, read_config
from umbra.ops.ascend import moe
from umbra.ops.ascend.exchange import AscendExchange
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.formats import FORMATS, Format
from umbra.ops.interface import Paged, fixed
from umbra.ops.parallel.groups import Parallel, Shard

NPU, BF16 = torch.device("npu", 0), torch.bfloat16
WHOLE = Parallel()


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


@dataclass
class Model:
    """A model on fake tensors: without values, without computation."""

    module: CausalLM
    ops: Any  # AscendOps
    pool: PagePool

    def batch(self, lengths: list[int]) -> Batch:
        sequences = [new_sequence(i, Request((1,) * n)) for i, n in enumerate(lengths)]
        for s in sequences:
            s.held = [Holding(None)]
            self.pool.extend(s.held[0], s.end)
        decode, tokens, wanted = max(lengths) == 1, (sum(lengths),), (len(lengths),)
        shape = StepShape(tokens, decode=decode, all_logits=decode, wanted_per_group=wanted)
        return Packer(self.ops, self.pool, 1).pack(sequences, shape).to(NPU)


@pytest.fixture
def make(tmp_path: Path, fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    def empty_with_format(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, acl_format: int) -> Tensor:
        """FakeTensorMode does not see torch_npu's own."""
        return torch.empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(torch_npu, "empty_with_format", empty_with_format)

    def checked(
        routing: str = "fusion_v2",
        format: Format | None = None,
        gemv_tokens: int = 0,
        family: Family = QWEN3,
        true_sizes: bool = False,
        parallel: Parallel = WHOLE,
        exchanged: int = 0,
    ) -> Model:
        """Steps of up to `exchanged` tokens send their rows to the experts of all ranks."""
        folder = tmp_path / "model"
        if true_sizes:  # those of official files are the defaults of a config
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps({"model_type": family.name, "num_hidden_layers": 2}))
        else:
            with torch._subclasses.fake_tensor.unset_fake_temporarily():
                family.save(folder, **family.sizes)
        ops, plain = AscendOps(BF16, NPU, routing, gemv_tokens), FORMATS["bfloat16"]
        tiled = Format("bfloat16", tiled=True)
        formats = Formats(plain, format or tiled, tiled)
        config, world = read_config(folder, family.name), parallel.world
        group = "group", world.rank, world.size, config.expert_count, exchanged
        exchange = AscendExchange(ops, *group) if exchanged else None
        build: Any = Build(ops, parallel, formats, BF16, NPU, 64, exchange=exchange)  # type: ignore[arg-type]
        module = model_class(family.name)(config, build)
        pool = PagePool(5, 128)
        for layer in module.modules():
            if isinstance(layer, PagedCache):
                layer.bind(*(fixed(layer.new_cache(part, 6, 128, BF16, NPU)) for part in range(layer.tensors)))
        return Model(module, ops, pool)

    return checked


@pytest.mark.parametrize(
    ("family", "routing", "format"),
    [
        *((QWEN3, routing, None) for routing in moe.ROUTINGS),
        (QWEN3, "fusion_v2", Format("q4", 32)),
        (GLM, "fusion_v2", Format("w8a8", 32)),
        (M2, "fusion_v2", Format("q4", 64, zeros=True)),
        (QWEN2, "fusion_v2", Format("q4", 32)),
        (GLM, "fusion_v2", None),
        (GPT_OSS, "fusion_v2", Format("q4", 32)),
        (V3, "fusion_v2", None),
        (FLASH, "fusion_v2", Format("q4", 32)),
        (V2, "fusion_v2", Format("w8a8", 32)),
        (LLAMA, "fusion_v2", Format("w8a8", 32)),
        (MINISTRAL3, "fusion_v2", Format("q4", 32)),
    ],
    ids=str,
)
def test_shapes_and_types(make: Callable[..., Model], family: Family, routing: str, format: Format | None) -> None:
    model = make(routing, format, family=family)
    with torch.inference_mode():
        prefill = model.module(model.batch([4, 1, 23]))
        decode = model.module(model.batch([1, 1]))
    for logits, rows in ((prefill, 3), (decode, 2)):
        assert (logits.shape, logits.dtype, logits.device) == ((rows, 96), BF16, NPU)


UNPACKED = {"unpack_w4a16": 4, "unpack_tiles_w4a16": 4}  # dense matrices and experts of two layers
EIGHT, SIXTEEN = CountedGroup(7, 8), CountedGroup(15, 16)
TRUE_SPLITS = {  # this rank is the last one
    "tp8": Parallel(EIGHT, EIGHT, CountedGroup(), Shard(7, 8), Shard(), EIGHT, EIGHT),
    "tp16": Parallel(SIXTEEN, SIXTEEN, CountedGroup(), Shard(15, 16), Shard(), SIXTEEN, SIXTEEN),
    "tp8dp2ep16": Parallel(SIXTEEN, EIGHT, CountedGroup(1, 2), Shard(), Shard(15, 16), EIGHT, EIGHT),
}


@pytest.mark.parametrize("split", TRUE_SPLITS)
def test_a_rank_of_the_true_minimax_m2(make: Callable[..., Model], split: str) -> None:
    """Two layers of hidden size 3072 with 48 and 8 heads, 256 experts of 1536 and the whole vocabulary."""
    parallel = TRUE_SPLITS[split]
    four_bits = Format("q4", 32, zeros=True)
    model = make(format=four_bits, gemv_tokens=8, family=M2, true_sizes=True, parallel=parallel)
    even: Any = dict(tokens_per_group=None, wanted_per_group=None)
    with torch.inference_mode(), Umbra() as seen:
        prefill = model.module(dataclasses.replace(model.batch([4, 1, 23]), **even))
        more = dict(seen.calls)
        decode = model.module(dataclasses.replace(model.batch([1, 1]), **even))
    assert [(x.shape, x.dtype) for x in (prefill, decode)] == [((3, 200064), BF16), ((2, 200064), BF16)]
    assert (more, seen.calls) == (UNPACKED, UNPACKED | {"gemv_w4a16": 4, "fused_moe_scores_w4a16": 2})


@pytest.mark.parametrize(("family", "ranks"), [(QWEN3, 8), (M2, 16)], ids=str)
def test_a_rank_exchanges_rows(make: Callable[..., Model], family: Family, ranks: int) -> None:
    """A decode step of the true models exchanges rows; a prefill of more rows gathers them."""
    world, alone = CountedGroup(ranks - 1, ranks), CountedGroup()
    parallel = Parallel(world, alone, world, Shard(), Shard(ranks - 1, ranks), alone, alone)
    model = make(format=Format("q4", 32), family=family, true_sizes=True, parallel=parallel, exchanged=2)
    operators = {"npu_moe_distribute_dispatch_v2": 2, "npu_moe_distribute_combine_v2": 2}
    for lengths, calls in (([1, 1], operators), ([1, 1, 1], {})):
        batch = dataclasses.replace(model.batch(lengths), tokens_per_group=None)
        with torch.inference_mode(), Umbra("npu") as seen:
            logits = model.module(batch)
        assert (len(logits), logits.dtype, logits.device) == (len(lengths), BF16, NPU)
        assert {op: n for op, n in seen.calls.items() if "distribute" in op} == calls


class Umbra(TorchDispatchMode):
    """Counts the ops of the vector cores, or of another namespace."""

    def __init__(self, namespace: str = "umbra") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.namespace = namespace
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == self.namespace:
            self.calls[op.overloadpacket.__name__] += 1
        return op(*args, **kwargs or {})


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=NPU)


@pytest.mark.usefixtures("fake")
def test_what_the_meta_functions_miss() -> None:
    """Each of these passes the real meta function; our own check names it."""
    ops = AscendOps(BF16, NPU, "fusion_v2")
    experts = ops.expert_matrices(4, 64, 128, FORMATS["bfloat16"], NPU)
    weights, ids = empty(3, 2), empty(3, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match="npu_grouped_matmul: 130 columns meet 128 rows"):
        ops.moe(empty(3, 130), weights, ids, experts, None)
    with pytest.raises(TypeError, match="npu_swiglu: 33 columns have no halves"):
        ops.silu_mul(empty(3, 33))
    with pytest.raises(TypeError, match=r"expert ids: torch\.int64"):
        ops.moe(empty(3, 128), weights, ids.long(), experts, None)
    with pytest.raises(TypeError, match=r"expert ids: torch\.int64"):
        AscendExchange(ops, "group", 0, 2, 8, 4).mixture(empty(3, 128), weights, ids.long(), experts)
    with pytest.raises(TypeError, match=r"group_list \(4,\) torch\.int32"):
        moe.grouped(empty(6, 128), experts.w13, empty(4, dtype=torch.int32), moe.COUNTS)
    with pytest.raises(TypeError, match=r"group_list \(5,\) torch\.int64"):
        moe.grouped(empty(6, 128), experts.w13, empty(5, dtype=torch.int64), moe.COUNTS)
    cache, table, lens = empty(5, 128, 128), empty(2, 1, dtype=torch.int32), (4, 9)
    with pytest.raises(TypeError, match=r"block_tables: torch\.int64"):
        ops.attention(empty(2, 4, 64), cache, cache, Paged(table, table.long(), (0, 1, 2), lens), 0.1)
    read_back = empty(2, dtype=torch.int64)
    with pytest.raises(TypeError, match="lengths must be host integers"):
        ops.attention(empty(2, 4, 64), cache, cache, Paged(table, table, (0, 1, 2), read_back), 0.1)
    with pytest.raises(UserError, match="head_dim: 80: npu_rotary_mul takes multiples of 32 up to 896"):
        ops.rope(empty(3, 4, 80), empty(3, 2, 80), empty(3, 80), empty(3, 80))


@pytest.mark.usefixtures("fake")
def test_impossible_weights_are_named() -> None:
    ops = AscendOps(BF16, NPU, "fusion_v2")
    with pytest.raises(UserError, match="one expert on a rank: npu_grouped_matmul takes two or more"):
        ops.expert_matrices(1, 64, 128, FORMATS["bfloat16"], NPU)
    with pytest.raises(UserError, match="a matrix of 96 inputs and 64 outputs on this rank cannot be cut"):
        ops.matrix(64, 96, Format("q4", 64), NPU)
    with pytest.raises(UserError, match=r"quantization\.method: q8 has no products on ascend"):
        ops.matrix(64, 96, FORMATS["q8"], NPU)
