"""All ops at the sizes of real models, on each supported CANN: torch_npu's host code takes them, and no rule that
CANN's sources demand (tests/fakes/cann/rules.cpp) is broken."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch_npu

from tests.ascend.log import violations
from tests.ascend.ranks import run_ranks
from tests.variants import thorough_but
from umbra.executor.platform.ascend.versions import ROWS
from umbra.models.layers.experts import chosen
from umbra.ops.ascend.attention import AttentionCall, attended
from umbra.ops.ascend.cann import abilities
from umbra.ops.ascend.latents import prolog
from umbra.ops.ascend.moe import BY_ROW, ROUTINGS, weighted_sum
from umbra.ops.ascend.ops import PROLOG_FORMAT, AscendOps
from umbra.ops.ascend.recurrent import GraphStrips
from umbra.ops.ascend.weights import FRACTAL_NZ, AscendExperts, AscendMatrix, Matrices
from umbra.ops.formats import Format
from umbra.ops.interface import (
    SILU_EXPERTS,
    ExpertKind,
    Groups,
    Heads,
    LatentNorm,
    Matrix,
    Paged,
    PrologWeights,
    Recurrent,
    Rounded,
    fixed,
)
from umbra.tools.npu_check.numbers import EIGHTH, WHOLE, Size

BF16, F32 = torch.bfloat16, torch.float32
W8A8 = Format("w8a8", group=128)
FORMATS = {"bf16": Format("bfloat16"), "q4": Format("q4", 32), "q4_zeros": Format("q4", 32, zeros=True)}
FORMATS |= {"w8a8": W8A8, "w8a8, gathered": W8A8}  # experts in tiles, and as slots give them to several ops
PAGE, PAGES = 128, 9


SIZES = {
    "30b": WHOLE,
    "30b_tp8": EIGHTH,
    "235b_tp8": Size("235B over 8", 4096, 192, 128, 8, 1, 128, 8),
    "235b_tp16": Size("235B over 16", 4096, 96, 128, 4, 1, 128, 8),
    "235b_ep16": Size("235B, experts over 16", 4096, 1536, 8, 64, 4, 128, 8),
    "qwen2_57b_tp4": Size("Qwen2-57B over 4 and 8", 3584, 320, 64, 7, 1, 128, 8),
    "qwen15_tp4": Size("Qwen1.5-MoE over 4", 2048, 352, 60, 4, 4, 128, 4),
    "air_ep8": Size("GLM-4.5-Air, experts over 8", 4096, 1408, 16, 12, 1, 128, 8),
    "glm46_tp8": Size("GLM-4.6 over 8", 5120, 192, 160, 12, 1, 128, 8),
    "oss20_tp2": Size("gpt-oss-20b over 2", 2880, 1440, 32, 32, 4, 64, 4),
    "oss120_ep8": Size("gpt-oss-120b over 8, experts over 8", 2880, 2880, 16, 8, 1, 64, 4),
    "oss120_tp2": Size("gpt-oss-120b over 8, experts over 2 and 4", 2880, 1440, 32, 8, 1, 64, 4),
    "m2_tp8": Size("MiniMax-M2 over 8", 3072, 192, 256, 6, 1, 128, 8),
}
SIGMOID = SIZES["m2_tp8"]  # its router, and norms of whole rows
OSS = tuple(SIZES[name] for name in ("oss20_tp2", "oss120_ep8", "oss120_tp2"))
NO_HEAD_NORMS = (SIGMOID, *OSS, *(SIZES[name] for name in ("qwen2_57b_tp4", "qwen15_tp4", "air_ep8")))
CANN = sorted({f"{cann}.0" for row in ROWS for cann in row.cann})


def kind_of(size: Size) -> ExpertKind:
    return ExpertKind(7.0, 1.702, biased=True) if size.hidden == OSS[0].hidden else SILU_EXPERTS


def tiled(plane: Matrices) -> None:
    if plane.scales is None or plane.format == FORMATS["w8a8"]:
        plane.data = torch_npu.npu_format_cast(input=plane.data, acl_format=FRACTAL_NZ, customize_dtype=None)


def layer(size: Size, how: str, routing: str, tokens: int, decode: bool, cann: str) -> None:
    """One layer's calls, without its norms of whole rows and its sums over ranks."""
    device = torch.device("npu")
    gathered = how == "w8a8, gathered"
    can = replace(abilities(cann), fused_swiglu=not gathered)
    ops, format = AscendOps(BF16, device, routing, can=can), FORMATS[how]
    x = torch.empty(tokens, size.hidden, dtype=BF16, device=device)
    width, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    qkv = AscendMatrix(width + 2 * kv, size.hidden, format, BF16, device)
    out = AscendMatrix(size.hidden, width, format, BF16, device)
    experts = AscendExperts(size.experts, size.inner, size.hidden, format, BF16, device, kind=kind_of(size))
    for plane in (qkv, out, *((experts.w13, experts.w2) if not gathered else ())):
        tiled(plane)
    weight = torch.empty(size.head_dim, dtype=BF16, device=device)
    angles = torch.empty(tokens, size.head_dim, dtype=BF16, device=device)
    k_cache, v_cache = (ops.kv_cache(PAGES, PAGE, size.kv_heads, size.head_dim, BF16, device) for _ in range(2))
    sequences = tokens if decode else 2
    none = array("q")
    numbers = array("q", range(tokens)), torch.empty(0, 0, dtype=torch.int64), none, none
    slots = ops.paging(*numbers, PAGE).slot_mapping.to(device)
    if norm := ops.rounding_norm(qkv):
        rounded, _ = norm(x, x, x[0], 1e-6, None)
        assert isinstance(rounded, Rounded)
        heads = rounded.linear(cast(Matrix, qkv), None)
    else:
        heads = ops.linear(x, qkv, None)
    if size in NO_HEAD_NORMS:
        q, k, v = (part.unflatten(1, (-1, size.head_dim)) for part in heads.split([width, kv, kv], -1))
        q, k = ops.rope(q, k, angles, angles)
        ops.write_kv(k, v, k_cache, v_cache, slots)
    else:
        of_heads = Heads(size.kv_heads, 1e-6, weight, weight, angles, angles)
        q = ops.norm_rope_write(heads, of_heads, k_cache, v_cache, slots, None)
    tables = torch.zeros(sequences, 4, dtype=torch.int32, device=device)
    starts = tuple(range(tokens + 1)) if decode else (0, 7, tokens)
    lengths = (300,) * tokens if decode else (7, tokens - 7)
    paged, sinks = Paged(slots, tables, starts, lengths), q[0, :, 0].contiguous() if size in OSS else None
    attended = ops.attention(q, k_cache, v_cache, paged, 1.0, None, sinks)
    if sinks is not None:
        ops.attention(q, k_cache, v_cache, paged, 1.0, 128, sinks)
    x = ops.linear(attended.flatten(1), out, None)
    if size is SIGMOID:
        scores = torch.empty(tokens, size.experts, dtype=torch.float32, device=device)
        weights, ids = chosen(ops.route_sigmoid(scores, scores[0], size.top_k, True, 2.5))
    else:
        router = torch.empty(tokens, max(size.experts, 128), dtype=BF16, device=device)
        weights, ids = chosen(ops.route_softmax(router, size.top_k, True))
        ops.route_softmax(router, size.top_k, False)
    y = ops.moe(x, weights, ids, experts, None if size.experts >= 128 else 0)
    ops.add_gated(ops.add_gated(y, x, None), x, x[:, :1].contiguous())


def delta_net(heads: tuple[int, int], by_row: bool, cann: str) -> None:
    """A prompt of 70 rows beside a row, in two steps from a mark; then two rows of a graph and one of padding. So many
    key and value heads of 128, also those of attention of 256 with partial rotation. `by_row`: as in Kimi-Linear."""
    device, (keys, values), state = torch.device("npu"), heads, 128 * 128
    decays = values * (128 if by_row else 1)
    ops = AscendOps(BF16, device, "fusion_v2", can=abilities(cann))
    channels, unit = (2 * keys + values) * 128, 4096
    arena = torch.zeros(6 * (values * state + 3 * channels + unit), device=device)
    delta = fixed(arena.as_strided((5 * values * state // unit, values, 128, 128), (unit, state, 128, 1)))
    conv = fixed(arena.as_strided((len(delta), 3, channels), (unit, channels, 1), values * state))
    far = values * state // unit + 3 * channels // unit + 1
    strips = GraphStrips([(conv, fixed(delta[:, 0, :0]), delta)], 3)
    weight, rates = torch.zeros(4, channels, device=device), torch.ones(values, device=device)
    bias = torch.ones(decays, device=device)
    steps = (0, 70, 71), [[-1, far], [0, far], [64, 0], [2 * far, 0], [0, 0]]
    graph = (0, 1, 2, 3), [[0, far, len(conv) - 1]] * 2 + [[0] * 3] * 3
    for starts, rows in (steps, graph):
        at = Recurrent(torch.tensor(starts), *(torch.tensor(row, dtype=torch.int32) for row in rows))
        if starts is graph[0]:
            at = strips.tables(Recurrent(at[0], *(table[None] for table in at[1:])))
            at = Recurrent(at[0].to(device), *(table[0].to(device) for table in at[1:]))
        count = starts[-1]
        qkvz, ba = tensor(count, channels + values * 128), tensor(count, values + decays)
        qkv, z = qkvz.split([channels, values * 128], 1)
        qkv = ops.causal_conv(qkv, weight, conv, at)
        y = ops.gated_delta_rule(qkv, ba[:, values:], ba[:, :values], rates, bias, delta, delta[:, 0, :0], at)
        ops.gated_rms_norm(y, z.unflatten(1, (-1, 128)), tensor(128), 1e-6, by_row)
        x, norm = tensor(count, 256), torch.ones(256, device=device)
        ops.add_rms_norm(x, x, norm, 1e-6)
        k_cache, v_cache = (ops.kv_cache(2, PAGE, 1, 256, BF16, device) for _ in "kv")
        places = torch.zeros(count, 2, dtype=torch.int64, device=device)
        of_heads = Heads(1, 1e-6, norm, norm, x, x)
        q = ops.norm_rope_write(tensor(count, 4 * 256), of_heads, k_cache, v_cache, places, None)
        block = torch.zeros(len(rows[0]), 1, dtype=torch.int32, device=device)
        ops.attention(q, k_cache, v_cache, Paged(places, block, starts, (70, 9, 9)[: len(block)]), 1.0)


def latents(heads: int, key: int, value: int, cann: str) -> None:
    """A decode step of three rows, and two prompts in both forms: heads with keys and values of so many columns."""
    device = torch.device("npu")
    ops, plain = AscendOps(BF16, device, "fusion_v2", can=abilities(cann)), FORMATS["bf16"]
    keys, values = (ops.head_matrices(heads, *of, plain, device) for of in ((512, key), (value, 512)))
    cache = (
        ops.latent_cache(0, PAGES, PAGE, 512, 64, BF16, device),
        ops.latent_cache(1, PAGES, PAGE, 512, 64, BF16, device),
    )
    for starts, lengths in (((0, 1, 2, 3), (300, 1, 7)), ((0, 7, 40), (7, 133))):
        tokens = starts[-1]
        slots, tables = (
            tensor(tokens, dtype=torch.int64),
            torch.zeros(len(lengths), 4, dtype=torch.int32, device=device),
        )
        paged, wide = Paged(slots, tables, starts, lengths), tensor(tokens, heads * (key + 64) + 576)
        q, rows = wide.split([heads * (key + 64), 576], 1)
        still, turning = (part.unflatten(1, (heads, -1)) for part in q.split([heads * key, heads * 64], 1))
        norm = LatentNorm(1e-6, tensor(512), tensor(tokens, 64), tensor(tokens, 64))
        turned = ops.rope_write_latents(turning, rows, norm, cache, slots)
        sums = ops.head_linear(ops.latent_attention(ops.head_linear(still, keys), turned, cache, paged, 0.1), values)
        if tokens > 3:
            if key == 128 and ops.can.prolog:
                before_latents(7168, heads)
            assert ops.expanded_attention(still, turned, cache, keys, values, paged, 0.1).shape == sums.shape
        scores = tensor(tokens, 256, dtype=F32)
        ops.route_sigmoid(scores, scores[0], 8, True, 2.5, Groups(8, 4, 2))
        ops.route_softmax(scores[:, :160].contiguous(), 6, False, 16.0, Groups(8, 3, 1))


def guess(hidden: int, vocabulary: int, parts: int, cann: str) -> None:
    """Runs the ops that a drafting step has beside its decoder layer: eight rows, of which three are wanted. Its
    projection takes `parts` states of a row."""
    device = torch.device("npu")
    ops, format = AscendOps(BF16, device, "fusion_v2", can=abilities(cann)), FORMATS["bf16"]
    projection = AscendMatrix(hidden, parts * hidden, format, BF16, device)
    head = AscendMatrix(vocabulary, hidden, format, BF16, device)
    tiled(projection)
    tiled(head)
    x, weight, rows = tensor(8, hidden), tensor(hidden), tensor(3, dtype=torch.int64)
    both = torch.cat([ops.rms_norm(x, weight, 1e-6) for _ in range(parts)], -1)
    y, residual = (of.index_select(0, rows) for of in (ops.linear(both, projection, None), x))
    tokens = ops.argmax(ops.linear(ops.add_rms_norm(y, residual, weight, 1e-6)[0], head, None))
    tensor(vocabulary, dtype=torch.int64).index_select(0, tokens)


GUESSES = {
    "glm46_tp8": (5120, 18_944, 2),
    "v3_tp16": (7168, 8_080, 2),
    "next": (2048, 151_936, 2),
    "eagle3": (4096, 32_000, 3),
}
LATENTS = {
    "v2_lite": (16, 128, 128),
    "flash": (20, 192, 256),
    "flash_tp4": (5, 192, 256),
    "v3": (128, 128, 128),
    "v3_tp16": (8, 128, 128),
    "k2_tp16": (4, 128, 128),
}
DELTA_NETS = {"35b": (16, 32), "35b_tp8": (2, 4), "122b": (16, 64), "397b_tp16": (1, 4)}
DELTA_NETS |= {"kimi_linear": (32, 32), "kimi_linear_tp8": (4, 4)}
Broken = dict[tuple[str, str, str], list[str]]


def broken(rank: int, cann: str, names: list[str]) -> tuple[Broken, str]:
    """The rules that each size, format and routing breaks, and the rule that heads break that are fused."""
    torch_npu.npu.config.allow_internal_format = True
    by_op: Broken = {}
    for name in names:
        for format in FORMATS:
            if FORMATS[format] is W8A8 and SIZES[name] in OSS:
                continue  # experts with biases
            for routing in ROUTINGS:
                for tokens, decode in ((3, True), (40, False)):
                    try:
                        layer(SIZES[name], format, routing, tokens, decode, cann)
                        torch.npu.synchronize()
                    except RuntimeError as error:
                        by_op.setdefault((name, format, routing), []).append(str(error).splitlines()[0])
                    if rules := violations():
                        by_op.setdefault((name, format, routing), []).extend(rules)
    others = {name: partial(delta_net, of, name.startswith("kimi"), cann) for name, of in DELTA_NETS.items()}
    others |= {name: partial(latents, *of, cann) for name, of in LATENTS.items()}
    others |= {f"guess of {name}": partial(guess, *of, cann) for name, of in GUESSES.items()}
    for name, steps in others.items():
        try:
            steps()
            torch.npu.synchronize()
        except RuntimeError as error:
            by_op.setdefault((name, "", ""), []).append(str(error).splitlines()[0])
        if rules := violations():
            by_op.setdefault((name, "", ""), []).extend(rules)
    try:
        heads()
    except RuntimeError as error:
        return by_op, f"{error}\n{violations()[0]}"
    return by_op, ""


def on(cann: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Broken, str]:
    """torch_npu asks for the version once, when it is imported; the newest is the fake's own."""
    monkeypatch.setenv("FAKE_CANN_VERSION", cann)
    (answer,) = run_ranks(broken, 1, cann, names, fresh=cann != CANN[-1])
    return answer


@pytest.mark.parametrize("cann", thorough_but(CANN, CANN[-1]))
def test_real_sizes_break_no_rule(cann: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides 4 bits without zero points on an older CANN, which `check_offsets` refuses; fused heads come with 9.0."""
    broken_rules, of_heads = on(cann, list(SIZES), monkeypatch)
    refused = {key for key in broken_rules if key[1] == "q4"}
    assert not {key: rules for key, rules in broken_rules.items() if key not in refused}
    assert bool(refused) == (cann < "9")
    assert all(
        "antiquantOffset must not be null" in rule for key in refused for rule in broken_rules[key] if "OT " in rule
    )
    assert ("161002" in of_heads) == ("not in CANN before 9.0" in of_heads) == (cann < "9")


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="npu")


def grouped(
    inputs: int = 0,
    rows: int = 64,
    columns: int = 64,
    counts: int = 4,
    tiles: bool = False,
    bias: torch.Tensor | None = None,
) -> None:
    """(8, `inputs`, or as many as `rows`) by four experts of (rows, columns)."""
    weights = tensor(4, rows, columns)
    if tiles:
        weights = torch_npu.npu_format_cast(input=weights, acl_format=FRACTAL_NZ, customize_dtype=None)
    torch_npu.npu_grouped_matmul(
        [tensor(8, inputs or rows)],
        [weights],
        bias=None if bias is None else [bias],
        group_list=tensor(counts, dtype=torch.int64),
        split_item=3,
        group_type=0,
        group_list_type=1,
    )


INT8 = torch.int8


def int8_experts(rows: int = 32, columns: int = 64, scale: torch.dtype = BF16, tiles: bool = True) -> None:
    """Eight rows by the second products of two experts."""
    weights = tensor(2, rows, columns, dtype=INT8)
    if tiles:
        weights = torch_npu.npu_format_cast(input=weights, acl_format=FRACTAL_NZ, customize_dtype=None)
    torch_npu.npu_grouped_matmul(
        [tensor(8, rows, dtype=INT8)],
        [weights],
        scale=[tensor(2, columns, dtype=scale)],
        per_token_scale=[tensor(8, dtype=F32)],
        group_list=tensor(2, dtype=torch.int64),
        split_item=3,
        group_type=0,
        group_list_type=1,
        output_dtype=BF16,
    )


def fused_swiglu(columns: int = 64, counts: torch.dtype = torch.int64, tiles: bool = True) -> None:
    weights = tensor(2, 32, columns, dtype=INT8)
    if tiles:
        weights = torch_npu.npu_format_cast(input=weights, acl_format=FRACTAL_NZ, customize_dtype=None)
    torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        tensor(8, 32, dtype=INT8),
        [weights],
        [tensor(2, columns, dtype=F32)],
        tensor(8, dtype=F32),
        tensor(2, dtype=counts),
        group_list_type=1,
    )


def dequant_swiglu(columns: int = 64, scale: torch.dtype = F32) -> None:
    torch_npu.npu_dequant_swiglu_quant(
        tensor(8, columns, dtype=torch.int32),
        weight_scale=tensor(2, columns, dtype=scale),
        activation_scale=tensor(8, dtype=F32),
        group_index=tensor(2, dtype=torch.int64),
        activate_left=True,
        quant_mode=1,
    )


def quant_matmul(inputs: int = 32, bias: torch.dtype = BF16) -> None:
    weight = torch_npu.npu_format_cast(input=tensor(32, 64, dtype=INT8), acl_format=FRACTAL_NZ, customize_dtype=None)
    torch_npu.npu_quant_matmul(
        tensor(8, inputs, dtype=INT8),
        weight,
        tensor(64, dtype=F32),
        pertoken_scale=tensor(8, dtype=F32),
        bias=tensor(64, dtype=bias),
        output_dtype=BF16,
    )


def ops() -> AscendOps:
    return AscendOps(BF16, torch.device("npu"), "fusion_v2")


def attention(page: int = 128, width: int = 128, sinks: torch.Tensor | None = None) -> None:
    caches = [tensor(4, width // 16, page, 16) for _ in range(2)]
    tables = tensor(2, 2, dtype=torch.int32)
    ops().attention(
        tensor(2, 4, width), caches[0], caches[1], Paged(tables, tables, (0, 1, 2), (9, 9)), 1.0, None, sinks
    )


def packed_attention(width: int) -> None:
    cache, tables = tensor(4, PAGE, width), tensor(2, 2, dtype=torch.int32)
    untiled = AscendOps(BF16, torch.device("npu"), "fusion_v2", can=abilities("8.5.0"))
    untiled.attention(tensor(3, 4, width), cache, cache, Paged(tables, tables, (0, 1, 3), (9, 9)), 1.0)


def heads(tokens: int = 2, places: torch.dtype = torch.int64, weights: int = 128) -> None:
    """Writes keys and values for two query heads of 128."""
    angles, weight = tensor(tokens, 128), tensor(weights)
    caches = [tensor(1, 8, 128, 16) for _ in "kv"]
    torch_npu.npu_qkv_rms_norm_rope_cache(
        tensor(tokens, 4 * 128),
        weight,
        weight,
        angles,
        angles,
        tensor(tokens, dtype=places),
        tensor(tokens, 256),
        *caches,
        qkv_size=[1, tokens, 4, 128],
        head_nums=[2, 1, 1],
    )


def dispatch(rows: int = 4, chosen: int = 4, ids: torch.dtype = torch.int32, room: int = 0) -> None:
    """`room` is the number of rows of all ranks that the operator is told of, if not as many as come."""
    torch_npu.npu_moe_distribute_dispatch_v2(
        tensor(rows, 1024), tensor(rows, chosen, dtype=ids), "group", 2, 0, 16, shared_expert_num=0, global_bs=room
    )


def combine(weights: torch.dtype = torch.float32, places: int = 128) -> None:
    """Four rows, four of 16 experts for each, on two ranks."""
    sums = tensor(4, 4, dtype=torch.int32), tensor(32 * places, dtype=torch.int32), tensor(16, dtype=torch.int32)
    torch_npu.npu_moe_distribute_combine_v2(
        tensor(32, 1024), *sums, tensor(4, 4, dtype=weights), "group", 2, 0, 16, shared_expert_num=0
    )


def split_attention(width: int = 512, heads: int = 2, rotary: int = 64, page: int = 128) -> None:
    """Over latents of `width` columns and their rotated keys."""
    cache, tables = (tensor(4, page, width), tensor(4, page, rotary)), tensor(2, 2, dtype=torch.int32)
    paged, rows = Paged(tables, tables, (0, 1, 2), (9, 9)), (tensor(2, heads, width), tensor(2, heads, rotary))
    call = AttentionCall(
        rows[0][:, None],
        cache[0],
        cache[0],
        None,
        None,
        paged.kv_lens,
        tables,
        heads,
        1,
        1.0,
        "BSND",
        0,
        0,
        0,
        page,
        rows[1][:, None],
        cache[1],
    )
    attended(call, False)


def write_latents(columns: int = 576, slots: torch.dtype = torch.int64, page: int = 128) -> None:
    angles = [tensor(3, 1, 1, 64) for _ in range(2)]
    torch_npu.npu_kv_rmsnorm_rope_cache_v2(
        tensor(3, 1, 1, columns),
        tensor(columns - 64),
        *angles,
        tensor(3, dtype=slots),
        tensor(4, page, 1, 64),
        tensor(4, page, 1, columns - 64),
        epsilon=1e-6,
        cache_mode="PA",
    )


def before_latents(hidden: int = 1024, heads: int = 2, slots: torch.dtype = torch.int64) -> None:
    tiled, device = PROLOG_FORMAT, torch.device("npu")
    q_a, q_b, kv_a = matrices = [
        ops().matrix(*of, tiled, device) for of in ((1536, hidden), (192 * heads, 1536), (576, hidden))
    ]
    for matrix in matrices:
        matrix.fill(0, torch.empty(matrix.rows, matrix.columns, dtype=BF16))
    keys = ops().head_matrices(heads, 512, 128, tiled, device)
    weights = PrologWeights(*cast(Any, (q_a, tensor(1536), q_b, kv_a, keys)))
    norm, cache = (
        LatentNorm(1e-6, tensor(512), tensor(3, 64), tensor(3, 64)),
        (tensor(4, 128, 1, 512), tensor(4, 128, 1, 64)),
    )
    prolog(tensor(3, hidden), weights, norm, cache, tensor(3, dtype=slots))


def products_of_heads(heads: int = 4, inputs: int = 128, outputs: int = 512) -> None:
    torch_npu.npu_transpose_batchmatmul(
        tensor(3, heads, inputs), tensor(heads, inputs, outputs), perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )


BROKEN: dict[str, Callable[[], object]] = {
    "group_list is (experts) int64": lambda: grouped(counts=3),
    "x has as many columns": lambda: grouped(inputs=32),
    "rows and columns of tiled weights": lambda: grouped(rows=60, tiles=True),
    "inner axes have 65,535": lambda: grouped(rows=65_552, columns=16),
    "biases are (experts, columns)": lambda: grouped(bias=tensor(4, 64)),
    "int8 has scales (experts, columns), bfloat16 with": lambda: int8_experts(scale=F32),
    "tiled weights of int8": lambda: int8_experts(columns=48),
    "rows and weights are int8, scales (experts, columns)": lambda: fused_swiglu(counts=torch.int32),
    "of 32 columns up to 10,240": lambda: fused_swiglu(columns=10_304),
    "weights of int8 are in tiles": lambda: fused_swiglu(tiles=False),
    "sums are int32": lambda: dequant_swiglu(scale=BF16),
    "sums have a multiple of 64 columns": lambda: dequant_swiglu(columns=96),
    "rows have 16 bits and become int8": lambda: torch_npu.npu_dynamic_quant(tensor(8, 32, dtype=F32)),
    "rows, residuals and weights of a norm": lambda: torch_npu.npu_add_rms_norm_dynamic_quant(
        tensor(8, 32), tensor(8, 32), tensor(32, dtype=F32), output_mask=[True, False]
    ),
    "rows and weights are int8, scales (rows)": lambda: quant_matmul(inputs=48),
    "a bias has the type of the result": lambda: quant_matmul(bias=torch.float16),
    "expert ids are int32, counts int64": lambda: torch_npu.npu_moe_init_routing_v2(
        tensor(3, 128),
        tensor(3, 2, dtype=torch.int64),
        active_num=6,
        expert_capacity=0,
        expert_num=8,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, 8],
        row_idx_type=0,
    ),
    "expanded_src_to_dst_row is int32": lambda: weighted_sum(
        tensor(6, 128), tensor(3, 2), tensor(6, dtype=torch.int64), None, BY_ROW
    ),
    "blocks have 128 tokens": lambda: attention(page=256),
    "heads of tiled caches have 64 or 128 values": lambda: attention(width=96),
    "sinks are (heads) bfloat16": lambda: attention(width=64, sinks=tensor(3)),
    "heads have 128 values": lambda: heads(weights=64),
    "index is (tokens) int64": lambda: heads(places=torch.int32),
    "as many tokens in all as the call": lambda: heads(tokens=129),
    "1 to 512 rows of 1,024 to 8,192 columns are sent": lambda: dispatch(rows=513),
    "are sent to 1 to 16 of": lambda: dispatch(chosen=17),
    "ids are int32, counts int64": lambda: dispatch(ids=torch.int64),
    "there is room for the rows of all ranks": lambda: dispatch(room=4),
    "results have 16 bits, ids are int32, weights float32": lambda: combine(weights=BF16),
    "128 numbers for each and a weight": lambda: combine(places=127),
    "an even number of values up to 896": lambda: torch_npu.npu_rotary_mul(*[tensor(1, 4, 1, 1024)] * 3),
    "the weight of a norm has the type": lambda: torch_npu.npu_rms_norm(tensor(4, 64), tensor(64, dtype=torch.float16)),
    "residuals and the weight of a norm": lambda: torch_npu.npu_add_rms_norm(
        *[tensor(4, 64)] * 2, tensor(64, dtype=F32)
    ),
    "indices are integers, and what": lambda: torch_npu.npu_scatter_nd_update_(
        tensor(8, 64), tensor(2, 1, dtype=torch.int32), tensor(2, 32)
    ),
    "packed tokens have 256 values": lambda: packed_attention(320),
    "heads with 64 rotated columns": lambda: split_attention(heads=6),
    "or 512 over one head of keys": lambda: split_attention(width=256),
    "rows are (tokens, 1, 1, 576)": lambda: write_latents(columns=320),
    "a multiple of 16 tokens, 1, 64 or 512": lambda: write_latents(slots=torch.int32),
    "queries' latents of 1,536": lambda: before_latents(hidden=512),
    "all before attention over latents is bfloat16": lambda: before_latents(slots=torch.int32),
    "multiples of 128, of all heads": lambda: products_of_heads(inputs=192),
    "fewer than 65,536 inputs": lambda: products_of_heads(heads=128, inputs=512, outputs=128),
    "scores are of 2,048 experts at most": lambda: torch_npu.npu_moe_gating_top_k(tensor(3, 4096), 4),
}


@pytest.mark.usefixtures("private_formats")
@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_is_enforced(rule: str) -> None:
    with pytest.raises(RuntimeError, match="161002"):
        BROKEN[rule]()
    (told,) = violations()
    assert rule in told
