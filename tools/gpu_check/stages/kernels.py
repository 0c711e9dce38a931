"""Triton's kernels on the card against what the ops mean on the CPU, and the share of the card's read rate at which
they read weights and caches."""

import functools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from umbra.ops import reference
from umbra.ops.cuda import kernels
from umbra.ops.cuda.grouped import grouped
from umbra.ops.cuda.unpack import unpack
from umbra.ops.cuda.weights import BlockExperts, ResidentExperts
from umbra.ops.formats import SPECS, Format
from umbra.ops.interface import SILU_EXPERTS, ExpertKind, Paged, Recurrent
from umbra.tools.gpu_check.blocks import FORMATS, random_blocks
from umbra.tools.npu_check.outcome import Check, Passed, Skipped

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8  # of Qwen3-30B-A3B
ROUNDS = 20
BOUND = 2e-2  # of bfloat16 results, of the largest


def checks() -> list[Check]:
    formats = [format for format in FORMATS if not format.zeros]
    return [
        *(Check(f"mixture {format.kind}", partial(mixture, format)) for format in formats),
        Check("mixture q4 biased", partial(mixture, Format("q4", 32, True), ExpertKind(7.0, 1.7, True))),
        *(
            Check(f"prompt {kind}, {n} tokens", partial(prompt, Format(kind, SPECS[kind].group or 0), n))
            for kind in ("q4", "q4_k", "f8", "bfloat16")
            for n in (64, 512, 4096)
        ),
        *(Check(f"attention {length}, {rows} rows", partial(attention, length, rows)) for length, rows in LENGTHS),
        Check("attention with a window and sinks", partial(attention, 3000, 4, 128)),
        *(Check(f"latents {length}, {rows} rows", partial(latents, length, rows)) for length, rows in LENGTHS),
        Check("delta rule", delta),
    ]


LENGTHS = ((500, 1), (8000, 1), (8000, 8))


@functools.cache
def read_rate() -> float:
    """GB/s at which the card sums a tensor that no cache holds."""
    big = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return big.nbytes / 1e6 / time_ms([partial(torch.sum, big)])


def time_ms(works: Sequence[Callable[[], Any]]) -> float:
    """The median time of a call, of calls that take turns, captured in one graph so that launches cost nothing."""
    for work in works:
        work()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(ROUNDS):
            works[i % len(works)]()
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / ROUNDS)
    return sorted(times)[2]


def differs(ours: Tensor, wanted: Tensor, bound: float) -> float:
    """The largest difference as a share of the largest element; raises if it is above `bound`."""
    error = float((ours.cpu().float() - wanted.float()).abs().max() / wanted.float().abs().max())
    if not error <= bound:
        raise AssertionError(f"off by {error:.2e} of the largest, more than {bound:.0e}")
    return error


def needs_gpu() -> None:
    if not torch.cuda.is_available():
        raise Skipped("torch sees no GPU")


def mixture(format: Format, kind: ExpertKind = SILU_EXPERTS) -> Passed:
    needs_gpu()
    torch.manual_seed(0)
    hidden, inner = (HIDDEN, INNER)
    shape, few = random_blocks(4, inner, hidden, format, kind)
    experts = BlockExperts(4, inner, hidden, format, torch.device("cpu"), kind)
    experts.data.copy_(few)
    x, weights = torch.randn(3, hidden), torch.rand(3, 2)
    ids = torch.tensor([[0, 1], [3, 9], [1, 0]])
    ours = kernels.mixture(x.cuda(), weights.cuda(), ids.cuda(), shape, few.cuda(), experts.places.cuda(), 0)
    error = differs(ours, grouped(x, weights, ids, experts, 0, unpack), 1e-4)
    measured: dict[str, Any] = {"error": error}
    many = few.cuda().repeat(EXPERTS // 4, 1)
    places = torch.arange(EXPERTS, device="cuda") * shape.block_bytes
    for rows in (1, 2, 4, 8):
        rows_of = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        chosen = [torch.rand(rows, EXPERTS, device="cuda").topk(TOP_K).indices for _ in range(8)]
        of = torch.rand(rows, TOP_K, device="cuda")
        works = [partial(kernels.mixture, rows_of, of, one, shape, many, places, 0) for one in chosen]
        ms = time_ms(works)
        used = sum(len(one.unique()) for one in chosen) / len(chosen)
        measured[f"us, {rows} rows"] = round(1e3 * ms, 1)
        measured[f"share of HBM, {rows} rows"] = round(used * shape.block_bytes / 1e6 / ms / read_rate(), 3)
    return Passed(f"{measured['share of HBM, 1 rows']:.0%} of {read_rate():.0f} GB/s at one row", measured)


def prompt(format: Format, tokens: int) -> Passed:
    """The mixture of many tokens, whose matrices are unpacked first."""
    needs_gpu()
    torch.manual_seed(0)
    shape, few = random_blocks(4, INNER, HIDDEN, format)
    on_host = BlockExperts(4, INNER, HIDDEN, format, torch.device("cpu"), SILU_EXPERTS)
    on_host.data.copy_(few)
    x, weights = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, TOP_K)
    ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
    experts = ResidentExperts(shape, few.cuda().repeat(EXPERTS // 4, 1), torch.arange(EXPERTS).cuda() * len(few[0]))
    work = partial(grouped, x.cuda(), weights.cuda(), ids.cuda(), experts, 0, kernels.unpack)
    wanted = grouped(x[:8].float(), weights[:8], ids[:8] % 4, on_host, 0, unpack)
    error, times = differs(work()[:8], wanted, BOUND), []
    for _ in range(7):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
    given = experts.data, experts.places, shape
    ms = sum(time_ms([partial(kernels.unpack, *given, name, x.dtype)]) for name in shape.shapes)
    moved = EXPERTS * (shape.block_bytes + 6 * INNER * HIDDEN) / 1e6
    measured = {"error": error, "ms": round(sorted(times)[3], 3), "ms to unpack": round(ms, 3)}
    return Passed(f"{measured['ms']} ms", measured | {"share of HBM": round(moved / ms / read_rate(), 3)})


def paged(length: int, rows: int, page: int) -> Paged:
    pages = -(-length // page)
    tables = torch.randperm(rows * pages, device="cuda").view(rows, pages)
    starts = torch.arange(rows + 1, device="cuda")
    return Paged(starts, tables, starts, torch.full((rows,), length, device="cuda"))


def on_host(of: Paged) -> Paged:
    return Paged(*(torch.as_tensor(tensor).cpu() for tensor in of))


def attention(length: int, rows: int, window: int | None = None) -> Passed:
    needs_gpu()
    torch.manual_seed(0)
    of, width, kv_heads, heads = paged(length, rows, 64), 128, 4, 32
    k, v = (torch.randn(of.block_tables.numel(), 64, kv_heads, width, device="cuda").bfloat16() for _ in range(2))
    q, sinks = torch.randn(rows, heads, width, device="cuda").bfloat16(), torch.randn(heads, device="cuda")
    given = q, k, v, of, width**-0.5, window, sinks if window else None
    host = q.cpu(), k.cpu(), v.cpu(), on_host(of), width**-0.5, window, sinks.cpu() if window else None
    error = differs(kernels.attention(*given), reference.attention(*host), BOUND)
    ms = time_ms([partial(kernels.attention, *given)])
    share = rows * min(length, window or length) * kv_heads * width * 4 / 1e6 / ms / read_rate()
    return Passed(f"{share:.0%} of HBM", {"error": error, "us": round(1e3 * ms, 1), "share of HBM": round(share, 3)})


def latents(length: int, rows: int) -> Passed:
    needs_gpu()
    torch.manual_seed(0)
    of, width, rotary, heads = paged(length, rows, 64), 512, 64, 128
    cache = torch.randn(of.block_tables.numel(), 64, 1, width + rotary, device="cuda").bfloat16()
    q, turned = (torch.randn(rows, heads, n, device="cuda").bfloat16() for n in (width, rotary))
    ours = kernels.latent_attention(q, turned, (cache,), of, 0.07)
    error = differs(ours, reference.latent_attention(q.cpu(), turned.cpu(), (cache.cpu(),), on_host(of), 0.07), BOUND)
    ms = time_ms([partial(kernels.latent_attention, q, turned, (cache,), of, 0.07)])
    share = rows * length * (width + rotary) * 2 / 1e6 / ms / read_rate()
    return Passed(f"{share:.0%} of HBM", {"error": error, "us": round(1e3 * ms, 1), "share of HBM": round(share, 3)})


def delta() -> Passed:
    """One row of tensor of eight sequences, with the sizes of Qwen3-Next."""
    needs_gpu()
    torch.manual_seed(0)
    rows, key_heads, heads, width = 8, 16, 32, 128
    channels = (2 * key_heads + heads) * width
    places = torch.arange(rows, dtype=torch.int32)
    none = torch.zeros(rows, dtype=torch.int32)
    tables = Recurrent(torch.arange(rows + 1), places, places, none, none, none)
    x, weight = torch.randn(rows, channels), torch.randn(4, channels) / 2
    a, b, rates, bias = torch.randn(rows, heads), torch.randn(rows, heads), torch.rand(heads), torch.randn(heads)
    conv, states = torch.randn(rows, 3, channels), torch.randn(rows, heads, width, width) * 0.1
    inputs = torch.zeros(rows, 0, key_heads * width + heads * width + 2 * heads)
    on_card = [tensor.cuda() for tensor in (x, weight, conv, a, b, rates, bias, states, inputs)]
    there = Recurrent(*(tensor.cuda() for tensor in tables))

    def run(ops: Any, of: Recurrent, *given: Tensor) -> Tensor:
        x, weight, conv, a, b, rates, bias, states, inputs = given
        out: Tensor = ops.gated_delta_rule(ops.causal_conv(x, weight, conv, of), a, b, rates, bias, states, inputs, of)
        return out

    ours = run(kernels, there, *on_card)
    error = differs(ours, run(reference, tables, x, weight, conv, a, b, rates, bias, states, inputs), 1e-4)
    differs(on_card[7], states, 1e-4)
    ms = time_ms([partial(run, kernels, there, *on_card)])
    share = 2 * states.nbytes / 1e6 / ms / read_rate()
    return Passed(f"{share:.0%} of HBM", {"error": error, "us": round(1e3 * ms, 1), "share of HBM": round(share, 3)})
