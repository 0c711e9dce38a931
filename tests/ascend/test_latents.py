"""L2: attention over latents against the reference, in decode steps and behind cached tokens, absorbed and expanded;
and a model's caches beside an arena."""

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ascend import npu_on_cpu  # noqa: F401 (registers)
from tests.ascend.engine import V3
from tests.ascend.test_numerics import save
from tests.ascend.test_shadow_numerics import WIDE, runner_of
from tests.ascend.workers import close_nodes
from umbra.executor.plan.activations import CountedGroup
from umbra.executor.plan.kv_caches import attentions
from umbra.models.batch import Batch, Subset
from umbra.models.build import Build, Formats
from umbra.models.layers.base import Layer
from umbra.models.layers.latent_attention import LatentAttention
from umbra.models.rope import RopeConfig
from umbra.ops import reference
from umbra.ops.ascend.cann import ALL_ABILITIES
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.formats import FORMATS, Format
from umbra.ops.interface import LatentNorm, fixed
from umbra.ops.parallel.groups import Parallel

CPU, PAGE, SCALE = torch.device("cpu"), 16, 0.05
STEPS = {"decode": ((1, 1, 1), (5, 48, 70)), "drafts": ((3, 2, 3), (7, 20, 33)), "prompts": ((4, 23, 1), (4, 50, 70))}


def attended(ops: Any, step: str, heads: int, widths: tuple[int, int], expanded: bool) -> Tensor:
    """The results of all heads for the new tokens. Pages that no sequence has hold NaN; keys are in the order of `ops`,
    rows lie apart."""
    torch.manual_seed(4)
    key, value = widths
    new, lengths = STEPS[step]
    matrices = []
    for shape in ((512, key), (value, 512)):
        matrices.append(ops.head_matrices(heads, *shape, FORMATS["float32"], CPU))
        for head in range(heads):
            matrices[-1].fill(head, torch.randn(shape) / 20)
    tables = torch.randperm(16)[:15].to(torch.int32).view(3, 5)
    slots = [int(tables[s, at // PAGE]) * PAGE + at % PAGE for s, n in enumerate(lengths) for at in range(n)]
    parts = tuple(ops.latent_cache(part, 16, PAGE, 512, 64, torch.float32, CPU) for part in range(ops.latent_parts))
    for part in parts:
        part.fill_(torch.nan)
    rows, q = torch.randn(len(slots), 580)[:, :576], torch.randn(sum(new), heads * (key + 64))
    if not ops.keys_in_pairs:
        rows = torch.cat((rows[:, :512], rows[:, 512::2], rows[:, 513::2]), 1)
    angles = torch.randn(len(slots), 32).repeat(1, 2)
    norm = LatentNorm(1e-6, torch.rand(512), angles.cos(), angles.sin())
    starts = array("q", torch.tensor([0, *new]).cumsum(0).tolist())
    paged = ops.paging(array("q", slots), tables, starts, array("q", lengths), PAGE)
    ops.rope_write_latents(torch.zeros(len(slots), 1, 64), rows, norm, parts, paged.slot_mapping)
    still, turned = (x.unflatten(1, (heads, -1)) for x in q.split([heads * key, heads * 64], 1))
    rest = turned.contiguous(), parts
    if expanded:
        values: Tensor = ops.expanded_attention(still, *rest, *matrices, paged, SCALE)
    else:
        sums = ops.latent_attention(ops.head_linear(still, matrices[0]), *rest, paged, SCALE)
        values = ops.head_linear(sums, matrices[1])
    return values


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "widths"), [(4, (128, 128)), (1, (128, 128)), (5, (192, 256))])
def test_both_forms_are_the_reference(heads: int, widths: tuple[int, int], step: str) -> None:
    ops = AscendOps(torch.float32, CPU, "fusion_v2")
    wanted = attended(reference, step, heads, widths, False)
    for expanded in (False, True):
        ours = attended(ops, step, heads, widths, expanded)
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


class Sizes(NamedTuple):
    hidden_size: int = 1024
    num_attention_heads: int = 4
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope: RopeConfig = RopeConfig(1e4, 64, None)


def test_one_op_before_attention_is_all_of_them() -> None:
    """On the second of two ranks: prompts, expanded, then a decode step over what they wrote."""
    given: dict[str, Tensor] = {}
    outs, rank = [], CountedGroup(1, 2)
    for prolog in (False, True):
        ops: Any = AscendOps(torch.bfloat16, CPU, "fusion_v2", can=replace(ALL_ABILITIES, prolog=prolog))
        plain, tiled = Format("bfloat16"), Format("bfloat16", tiled=True)
        parallel = Parallel(attn_tp=rank)
        build = Build(ops, parallel, Formats(plain, tiled, tiled), torch.bfloat16, CPU, 64)
        layer = LatentAttention(Sizes(), build)
        assert (layer.prolog is not None) == prolog
        torch.manual_seed(4)
        for name, module in layer.named_modules():
            for piece in module.pieces(name) if isinstance(module, Layer) else ():
                if piece.name not in given:
                    given[piece.name] = torch.randn(piece.shape) / 30 + (piece.mean or 0)
                assert piece.fill
                piece.fill(given[piece.name][piece.part].bfloat16())
        layer.attention.bind(*(fixed(layer.attention.new_cache(n, 4, PAGE, torch.bfloat16, CPU)) for n in (0, 1)))
        tables, rows = torch.tensor([[2, 1], [3, 0]]), torch.Generator().manual_seed(5)
        for starts, lengths in (((0, 20, 27), (20, 7)), ((0, 1, 2), (21, 8))):
            new = [range(n - (e - s), n) for s, e, n in zip(starts, starts[1:], lengths, strict=False)]
            slots = [int(tables[s, at // PAGE]) * PAGE + at % PAGE for s, of in enumerate(new) for at in of]
            paged = (ops.paging(array("q", slots), tables, array("q", starts), array("q", lengths), PAGE),)
            count = torch.arange(len(slots))
            batch = Batch(count, count, paged, None, None, expanded=Subset(count, paged) if starts[1] > 1 else None)
            x, angles = (torch.randn(len(slots), n, generator=rows) for n in (1024, 32))
            angles = angles.repeat(1, 2)
            outs.append(layer(x.bfloat16(), angles.cos().bfloat16(), angles.sin().bfloat16(), batch))
        outs += layer.attention.caches
    for ours, wanted in zip(outs[4:], outs[:4], strict=True):
        torch.testing.assert_close(ours, wanted, atol=0.02, rtol=0.02)


def test_rotated_keys_beside_an_arena_move_with_their_latents(tmp_path: Path) -> None:
    save(V3, tmp_path, **WIDE)
    runner = runner_of(tmp_path, model_name=V3.name, offload_config={"mode": "elastic", "arena_mb": 3})
    pages: Any = runner.engine.pages
    caches = [cache for layer in attentions(runner.engine.model) for cache in layer.caches]
    first, second = pages.arena.units, 2 * pages.arena.units
    for number, cache in enumerate(caches):
        cache[first] = number + 1
    pages.copy(first, second)
    assert [(float(cache[second].min()), float(cache[second].max())) for cache in caches] == [
        (n, n) for n in (1, 2, 3, 4)
    ]
    close_nodes()
