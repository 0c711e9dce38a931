"""Attention over latents of one layer in both forms, as shapes of 16 heads (DeepSeek-V2-Lite) and 20 (GLM-4.7-Flash).

    .venv/bin/umbra bench latent_forms [--rows 64+0 512+0 4096+0 ...] [--format bfloat16|q8]

A row has a prompt's `new` tokens behind `cached` ones in one step, the median milliseconds of the absorbed form with
the products by the heads' matrices around it, those of the expanded form, their ratio, that of their multiply-adds
(`counts`), and the rate of the expanded form.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from umbra.base.errors import run_main
from umbra.ops import load_ops
from umbra.ops.cpu import engine
from umbra.ops.formats import FORMATS, Format
from umbra.ops.interface import Paged
from umbra.tools.benchmarks.machine import alternate
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows

SHAPES = (16, 128, 128), (20, 192, 256)  # heads, columns of a key, of a value
LATENT, ROTARY, PAGE, SCALE, CPU = 512, 64, 16, 0.05, torch.device("cpu")
ROWS = "64+0", "128+0", "512+0", "2048+0", "4096+0", "128+1024", "256+1024", "384+4096"
FORMS = {"bfloat16": FORMATS["bfloat16"], "q8": FORMATS["q8"]}
COLUMNS = (
    ("heads", "heads", 6, ""),
    ("new", "new", 6, ""),
    ("cached", "cached", 8, ""),
    ("absorbed_ms", "absorbed", 10, ".2f"),
    ("expanded_ms", "expanded", 10, ".2f"),
    ("ratio", "ratio", 7, ".2f"),
    ("counts", "counts", 8, ".2f"),
    ("gmacs", "GMAC/s", 8, ".0f"),
)


def row(shape: tuple[int, int, int], new: int, cached: int, format: Format, seconds: float) -> Row:
    cpu, (heads, key, value), length = load_ops("cpu"), shape, cached + new
    pages = -(-length // PAGE)
    cache = (cpu.latent_cache(0, pages, PAGE, LATENT, ROTARY, torch.bfloat16, CPU),)
    cpu.write_latents(torch.randn(length, LATENT), torch.randn(length, ROTARY), cache, torch.arange(length))
    keys, values = (cpu.head_matrices(heads, *size, format, CPU) for size in ((LATENT, key), (value, LATENT)))
    for head in range(heads):
        keys.fill(head, torch.randn(LATENT, key) * LATENT**-0.5)
        values.fill(head, torch.randn(value, LATENT) * LATENT**-0.5)
    paged = Paged(torch.empty(0), torch.randperm(pages)[None], torch.tensor([0, new]), torch.tensor([length]))
    q, q_rotary = torch.randn(new, heads, key), torch.randn(new, heads, ROTARY)

    def absorbed() -> Tensor:
        sums = cpu.latent_attention(cpu.head_linear(q, keys), q_rotary, cache, paged, SCALE)
        return cpu.head_linear(sums, values)

    def expanded() -> Tensor:
        return cpu.expanded_attention(q, q_rotary, cache, keys, values, paged, SCALE)

    took = alternate({"absorbed": absorbed, "expanded": expanded}, seconds, 3)
    pairs, projecting = new * cached + new * (new + 1) / 2, LATENT * (key + value)
    counts = pairs * (2 * LATENT + ROTARY) + new * projecting, pairs * (key + value + ROTARY) + length * projecting
    ms = {f"{name}_ms": seconds * 1e3 for name, seconds in took.items()}
    ratio = took["absorbed"] / took["expanded"]
    return dict(
        heads=heads,
        new=new,
        cached=cached,
        **ms,
        ratio=ratio,
        counts=counts[0] / counts[1],
        gmacs=heads * counts[1] / took["expanded"] / 1e9,
    )


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--rows", nargs="+", default=ROWS, help="new+cached tokens")
    parser.add_argument("--format", choices=FORMS, default="bfloat16", help="of the heads' matrices")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured for each row")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"{engine.start(args.threads, args.instruction_set)}, {engine.placement()}")

    def rows() -> Iterator[Row]:
        for shape in SHAPES:
            for text in args.rows:
                new, cached = map(int, text.split("+"))
                yield row(shape, new, cached, FORMS[args.format], args.seconds)

    write_rows(args.json, printed(rows(), COLUMNS), threads=args.threads, format=args.format)


if __name__ == "__main__":
    run_main(main)
