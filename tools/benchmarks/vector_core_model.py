"""A cycle model of the vector-core kernels: counts of the twin turned into microseconds. A model, not a measurement.

    .venv/bin/umbra bench vector_core_model               # compared with the seed's measured table; two
    minutes .venv/bin/umbra bench vector_core_model traffic       # bytes of global memory, also with
    half sums .venv/bin/umbra bench vector_core_model unpack        # experts and dense matrices, for
    more tokens .venv/bin/umbra bench vector_core_model choice        # what choosing experts adds to the
    mixture .venv/bin/umbra bench vector_core_model validate      # the model compared with published
    times

tools.benchmarks.vector_core_machine has the constants, tools.benchmarks.vector_core_examples the published times.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

import torch

from tests.fakes.ascend_c import Counts
from tests.fakes.ascend_c.launch import launch
from umbra.models.registry import shapes
from umbra.ops.ascend.vector_core.planes import Planes, planes_of
from umbra.tools.benchmarks.vector_core_examples import launched, print_examples, seed_fused
from umbra.tools.benchmarks.vector_core_machine import HIGH, LOW, microseconds, predict

BFLOAT16 = torch.bfloat16
SEED_US = {1: (43.42, 199.43), 2: (60.49, 266.82), 4: (96.18, 515.69), 8: (174.35, 936.17)}  # kernel, grouped matmul
RATED = 1600  # GB/s
NIBBLES, SCALES = ("w13", "w2"), ("s13", "s2")
WAYS = {"in rows": False, "in tiles": True}  # of unpacked experts
SHOWN = ("memory", "mte2", "vector", "repeats", "conflicts", "barriers", "scalar")


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden: int
    inner: int  # of one rank
    batch: int
    top_k: int = 8
    group: int = 32
    cores: int = 48

    def experts(self, routed: bool) -> tuple[int, torch.Tensor]:
        """Ids (batch, top_k): all different, or of a random router with 128 experts."""
        if not routed:
            pairs = self.batch * self.top_k
            return pairs, torch.arange(pairs, dtype=torch.int32).view(self.batch, -1)
        random = torch.Generator().manual_seed(6)
        return 128, torch.stack([torch.randperm(128, generator=random)[: self.top_k] for _ in range(self.batch)]).int()


def count(op: str, inputs: dict[str, torch.Tensor | None], attributes: tuple[int, ...], cores: int = 48) -> Counts:
    """Counts of one launch of `op`, as its host side tiles it; they do not depend on values."""
    return launch(op, *inputs.values(), attributes=attributes, cores=cores)[1]


def bank(planes: Planes, *sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros of `sizes`: experts, if any, and columns."""
    *experts, columns = sizes
    scales = torch.ones(*experts, *planes.scales_shape(columns), dtype=BFLOAT16)
    return torch.zeros(*experts, *planes.words_shape(columns), dtype=torch.uint8), scales


@cache
def fused(shape: ModelShape, routed: bool = False, float_sums: bool = False) -> Counts:
    experts, ids = shape.experts(routed)
    w13, s13 = bank(planes_of(shape.hidden, shape.group), experts, 2 * shape.inner)
    w2, s2 = bank(planes_of(shape.inner, shape.group, ordered=True), experts, shape.hidden)
    x, weights = torch.ones(shape.batch, shape.hidden, dtype=BFLOAT16), torch.ones(ids.shape, dtype=BFLOAT16)
    inputs = dict(x=x, w13=w13, s13=s13, z13=None, w2=w2, s2=s2, z2=None, ids=ids, weights=weights)
    return count("fused_moe", inputs, (shape.group, shape.group, float_sums), shape.cores)


def unpacked(rows: int, columns: int, experts: int, down: bool, tiles: bool) -> Counts:
    w, scales = bank(planes_of(rows, 32, ordered=down), experts, columns)
    pairs = not down and experts > 1
    return count("unpack", dict(w=w, scales=scales, zeros=None), (32, down, pairs, tiles))


def gemv(tokens: int, rows: int, columns: int) -> Counts:
    w, scales = bank(planes_of(rows, 32), columns)
    x = torch.ones(tokens, rows, dtype=BFLOAT16)
    return count("gemv", dict(x=x, w=w, scales=scales, zeros=None), (32, False))


def chosen(shape: ModelShape, scored: int, sigmoid: bool) -> Counts:
    """The mixture of `fused`, which chooses the same experts from scores."""
    experts, ids = shape.experts(False)
    w13, s13 = bank(planes_of(shape.hidden, shape.group), experts, 2 * shape.inner)
    w2, s2 = bank(planes_of(shape.inner, shape.group, ordered=True), experts, shape.hidden)
    x, bias = torch.ones(shape.batch, shape.hidden, dtype=BFLOAT16), torch.zeros(scored) if sigmoid else None
    scores = torch.zeros(shape.batch, scored, dtype=torch.float32 if sigmoid else BFLOAT16)
    scores.scatter_(1, ids.long(), 1.0)
    inputs = dict(x=x, w13=w13, s13=s13, z13=None, w2=w2, s2=s2, z2=None, scores=scores, bias=bias)
    attributes = (shape.top_k, sigmoid, 0, shape.group, shape.group, False)
    return count("fused_moe_scores", inputs, attributes, shape.cores)


def weight_bytes(counts: Counts) -> int:
    return sum(moved["read"] for name, moved in counts.buffers.items() if name in NIBBLES + SCALES)


def nibbles_cast(counts: Counts, phase: int) -> list[int]:
    """Repeats of Cast from nibbles on each core, which stand for its work."""
    return [core[phase]["repeats"].get("Cast<half,int4b_t>", 0) for core in counts.cores]


def busy_cores(counts: Counts, phase: int) -> int:
    return sum(work > 0 for work in nibbles_cast(counts, phase))


def large_moves(counts: Counts, least: int = 16384) -> float:
    """The share of nibbles' bytes that came in moves of `least` bytes and more."""
    sizes = {int(size): count * int(size) for size, count in counts.total["mte2"]["by_move"].items()}
    nibbles = sum(moved["read"] for name, moved in counts.buffers.items() if name in NIBBLES)
    return sum(size for at, size in sizes.items() if at >= least) / nibbles


def between(low: float, high: float, places: int = 1) -> str:
    return f"{low:.{places}f}..{high:.{places}f}"


def print_model(float_sums: bool) -> None:
    print("model, not measurement; us as low..high; bfloat16, W4, group 32, H 2048, I 768, top-8;", end=" ")
    print("float sums" if float_sums else "runs of 8 in half")
    print("measured, on 40 cores: seed, its kernel; grouped mm, npu_grouped_matmul. * seed's kernel by the model")
    tables = ((48, False, "all experts different"), (40, False, "the same"), (48, True, "random routing, 128 experts"))
    for cores, routed, routing in tables:
        print(f"\nfused_moe_w4a16, {cores} cores, {routing}")
        head = ("cores' time", "with launch", "GB/s", "of 1.6 TB/s", "seed *", "seed", "grouped mm")
        print("batch      MB " + " ".join(f"{name:>13}" for name in (head[:4] if routed else head)))
        for batch, measured in SEED_US.items():
            counts = fused(ModelShape("", 2048, 768, batch, cores=cores), routed, float_sums)
            low, high = (microseconds(counts.cores, machine) for machine in (LOW, HIGH))
            size = weight_bytes(counts)
            slow, fast = size / high / 1e3, size / low / 1e3
            cells = [between(low, high), between(low + LOW.launch / 1e3, high + HIGH.launch / 1e3)]
            cells += [between(slow, fast, 0), between(slow / RATED, fast / RATED, 2)]
            if not routed:
                seed = launched(seed_fused(batch, cores), launches=0)
                cells += [between(seed(LOW), seed(HIGH))]
                cells += [f"{us:.2f}" for us in measured]
            print(f"{batch:5} {size / 1e6:7.1f} " + " ".join(f"{cell:>13}" for cell in cells))
    print("\nfused_moe_w4a16, 48 cores, all experts different: the slowest core's pipes by phase")
    print("batch phase cores   " + "  ".join(f"{name:>11}" for name in (*SHOWN, "bound")))
    for batch in SEED_US:
        counts = fused(ModelShape("", 2048, 768, batch), False, float_sums)
        for number, (low, high) in enumerate(zip(*(predict(counts.cores, m) for m in (LOW, HIGH)), strict=True)):
            columns = [between(low.busy[pipe] / 1e3, high.busy[pipe] / 1e3) for pipe in SHOWN]
            bound = low.bound if low.bound == high.bound else f"{low.bound}, {high.bound}"
            busy = busy_cores(counts, number)
            print(f"{batch:5} {number + 1:5} {busy:5}   " + "  ".join(f"{cell:>11}" for cell in [*columns, bound]))


def print_choice() -> None:
    print("model, not measurement; us as low..high; fused_moe_w4a16, 48 cores, all experts different; added: by")
    print("fused_moe_scores_w4a16; vector, scalar: what the choice adds to these pipes of the slowest core")
    for model, ranks, sigmoid in (("Qwen3-30B-A3B", 1, False), ("MiniMax-M2", 8, True)):
        _, hidden, inner, scored, _ = shapes()[model]
        inner, part = inner // ranks, f" / {ranks}" if ranks > 1 else ""
        name = f"{model}{part}, {scored} experts, {'sigmoid' if sigmoid else 'softmax'}"
        print(f"\n{name}\nbatch " + " ".join(f"{cell:>13}" for cell in ("given", "added", "vector", "scalar")))
        for batch in SEED_US:
            shape = ModelShape(name, hidden, inner, batch)
            given, ours = fused(shape).cores, chosen(shape, scored, sigmoid).cores
            cells = [[microseconds(given, machine) for machine in (LOW, HIGH)]]
            cells += [[microseconds(ours, machine) - us for machine, us in zip((LOW, HIGH), cells[0], strict=True)]]
            for pipe in ("vector", "scalar"):
                busy = [
                    [predict(cores, machine)[0].busy[pipe] / 1e3 for cores in (given, ours)] for machine in (LOW, HIGH)
                ]
                cells += [[after - before for before, after in busy]]
            print(f"{batch:5} " + " ".join(f"{between(low, high, 2):>13}" for low, high in cells))


def print_traffic() -> None:
    print("KB counted by the twin; bfloat16, group 32, all experts different, 48 cores.")
    print("needed: nibbles, scales, x and y once. >= 16 KB: of the nibbles' bytes, in such moves.")
    print("%: the workspace, of weights (nibbles and scales) and of nibbles alone.")
    print("cores: all work over the longest core's, by product.")
    head = ("nibbles", "scales", "x", "workspace", "y", "all / needed", "% weights", "% nibbles", ">= 16 KB", "cores")
    print(f"{'fused_moe_w4a16':26} batch " + " ".join(f"{name:>12}" for name in head))
    for name, (_, hidden, inner, *_) in shapes().items():
        for over in (1, 8):
            for batch in (1, 8):
                shape = ModelShape(name + (" / 8" if over == 8 else ""), hidden, inner // over, batch)
                print_bytes(shape, fused(shape))


def print_unpacked() -> None:
    """With 235B over 8: all experts of a layer; the attention's matrices, also by gemv_w4a16."""
    print("model, not measurement; us of each pipe as low..high; bfloat16, group 32, 48 cores")
    wide = {f"w13 of 128 experts, {how}": unpacked(4096, 384, 128, False, tiles) for how, tiles in WAYS.items()}
    wide |= {f"w2 of 128 experts, {how}": unpacked(192, 4096, 128, True, tiles) for how, tiles in WAYS.items()}
    for rows, columns in ((4096, 1280), (1024, 4096)):
        wide[f"({rows}, {columns}) unpacked"] = unpacked(rows, columns, 1, False, False)
        wide |= {f"({rows}, {columns}), gemv of {n}": gemv(n, rows, columns) for n in (1, 4, 8)}
    print(f"{'':28}       MB " + " ".join(f"{name:>15}" for name in ("time", "memory", "vector")))
    for name, counts in wide.items():
        (low, *_), (high, *_) = (predict(counts.cores, machine) for machine in (LOW, HIGH))
        size = sum(sum(moved.values()) for moved in counts.buffers.values())
        cells = [between(microseconds(counts.cores, LOW), microseconds(counts.cores, HIGH))]
        cells += [between(low.busy[pipe] / 1e3, high.busy[pipe] / 1e3) for pipe in ("memory", "vector")]
        print(f"{name:28} {size / 1e6:8.1f} " + " ".join(f"{cell:>15}" for cell in cells))


def print_bytes(shape: ModelShape, counts: Counts) -> None:
    rows = 2 * shape.batch * shape.hidden * 2  # bytes of x and y, once
    moved = {name: sum(both.values()) for name, both in counts.buffers.items()}
    nibbles = sum(moved.get(name, 0) for name in NIBBLES)
    weights = weight_bytes(counts)
    columns = [nibbles, weights - nibbles, moved["x"], moved["workspace"], moved["y"]]
    work = [cast for phase in range(counts.waits + 1) if any(cast := nibbles_cast(counts, phase))]
    cells = [f"{value / 1e3:.0f}" for value in columns]
    cells += [f"{sum(moved.values()) / (weights + rows):.3f}"]
    cells += [f"{100 * moved['workspace'] / part:.2f}" for part in (weights, nibbles)]
    cells += [f"{large_moves(counts):.2f}", ", ".join(f"{sum(loads) / max(loads):.1f}" for loads in work)]
    print(f"{shape.name:26} {shape.batch:5} " + " ".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    if sys.argv[1:] == ["traffic"]:
        print_traffic()
    elif sys.argv[1:] == ["unpack"]:
        print_unpacked()
    elif sys.argv[1:] == ["choice"]:
        print_choice()
    elif sys.argv[1:] == ["validate"]:
        print_examples()
    else:
        print_model(float_sums=False)
        print_model(float_sums=True)
