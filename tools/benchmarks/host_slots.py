"""Rate at which the CPU multiplies experts in a device's slot layout, beside its own blocks, in one process, in turns.

    umbra bench host_slots [--threads 2] [--tokens 1 4 8] [--rounds 40] [--instruction-set SET] [--json FILE]

Top-8 mixtures of experts that no cache holds, each token with others, both layouts on huge pages. GB/s count each used
expert's bytes as the CPU's blocks have them. `ratio`: median of the slots' rate / the blocks' of each round.
"""

import statistics
from collections.abc import Iterator

import torch

from umbra.base.errors import run_main
from umbra.executor.platform.ascend.slot_store import npu_blocks
from umbra.ops.cpu import engine
from umbra.ops.cpu.engine import native, shadow_teams
from umbra.ops.cpu.memory import allocate
from umbra.ops.cpu.shadow import BlockShape, ExpertBlocks, ShadowLayer, ShadowMixture, ShadowPool, prepare
from umbra.ops.formats import FORMATS, Format
from umbra.ops.interface import SILU_EXPERTS
from umbra.tools.benchmarks.machine import take_turns
from umbra.tools.benchmarks.output import Row, flags, plot, printed, write_rows

TOP_K, STORE = 8, 512 << 20  # bytes of a layout's experts
SHAPES = {"V4-Flash": (4096, 2048), "30B": (2048, 768)}  # hidden, inner
LAYOUTS = {
    "q4 in lines": (Format("q4", 32), False),
    "int8": (FORMATS["w8a8"], False),
    "planes, groups of 128": (Format("q4", 128), True),
    "planes, groups of 32": (Format("q4", 32), True),
}
COLUMNS = (
    ("layout", "layout", 22, ""),
    ("shape", "shape", 10, ""),
    ("tokens", "tokens", 7, ""),
    ("blocks_gbps", "blocks GB/s", 12, ".1f"),
    ("slots_gbps", "slots GB/s", 12, ".1f"),
    ("ratio", "ratio", 7, ".2f"),
)


def jobs_of(pool: ShadowPool, blocks: BlockShape, routing: torch.Tensor, count: int) -> list[ShadowMixture]:
    """A mixture for each of `routing`, (calls, tokens, top k), of `count` experts with small weights."""
    buffer = allocate(count * blocks.block_bytes, 0)
    memory = torch.frombuffer(buffer, dtype=torch.uint8).fill_(0x3C)  # scales of 0.01 to 1
    table = memory.data_ptr() + blocks.block_bytes * torch.arange(count)
    counts, hits, times = (torch.zeros(size, dtype=torch.int64) for size in (count, 1, 4))
    layer = ShadowLayer(0, blocks, table, table, counts, hits, times, memory)
    return [prepare(pool, layer, torch.randn(len(ids), blocks.hidden), ids) for ids in routing]


def measured(pool: ShadowPool, layout: str, shape: str, tokens: int, rounds: int) -> Row:
    (hidden, inner), (format, in_planes) = SHAPES[shape], LAYOUTS[layout]
    own = ExpertBlocks(inner, hidden, format)
    count = STORE // own.block_bytes
    routing = torch.stack([torch.randperm(count) for _ in range(tokens)])[:, : count // TOP_K * TOP_K]
    calls = routing.view(tokens, -1, TOP_K).transpose(0, 1).contiguous()
    used = sum(len(ids.unique()) for ids in calls)
    slots = npu_blocks(inner, hidden, format, SILU_EXPERTS, torch.bfloat16, in_planes)
    jobs = {name: jobs_of(pool, blocks, calls, count) for name, blocks in (("blocks", own), ("slots", slots))}

    def run(name: str) -> None:
        for job in jobs[name]:
            native.moe_rows(rows=job.resident)

    times = take_turns({"blocks": lambda: run("blocks"), "slots": lambda: run("slots")}, 0.0, rounds)
    gbps = {name: used * own.block_bytes / statistics.median(seconds) / 1e9 for name, seconds in times.items()}
    ratio = statistics.median(b / s for b, s in zip(times["blocks"], times["slots"], strict=True))
    return dict(
        layout=layout, shape=shape, tokens=tokens, blocks_gbps=gbps["blocks"], slots_gbps=gbps["slots"], ratio=ratio
    )


def main(argv: list[str]) -> None:
    parser = flags(__doc__, "umbra bench host_slots")
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 4, 8))
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    chosen = engine.start(args.threads, args.instruction_set)
    pool = ShadowPool(shadow_teams(1))

    def rows() -> Iterator[Row]:
        for layout in LAYOUTS:
            for shape in SHAPES:
                for tokens in args.tokens:
                    yield measured(pool, layout, shape, tokens, args.rounds)

    print(f"{chosen}, {args.threads} threads")
    printed_rows = printed(rows(), COLUMNS)
    write_rows(args.json, printed_rows, threads=args.threads, instruction_set=chosen)
    lines = {
        f"{layout}, {shape}": (
            args.tokens,
            [r["ratio"] for r in printed_rows if (r["layout"], r["shape"]) == (layout, shape)],
        )
        for layout in LAYOUTS
        for shape in SHAPES
    }
    plot(args.plot, {"tokens": lines}, "slots' rate / blocks'")


if __name__ == "__main__":
    run_main(main)
