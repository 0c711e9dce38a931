"""Simulates the prefill of DeepSeek-V4-Flash with its experts in host memory, on one A3 die and 40 Kunpeng cores.

    .venv/bin/umbra bench streamed_prefill [--chunk N] [--warm N] [--json FILE]

Which experts are copied, when, and which the CPU computes is decided by the code of a run (cpu_offload/expert_ring.py);
link, device and CPU only take time (planner/streamed_prefill.py), at the rates of hardware single_card_a3. Tokens
choose experts at random. A ring has seen `--warm` prompts of the same length before. Beside it are the figures that
cann-recipes-infer publishes for the same model and machine, which were measured.

A row, of the table and of `rows` in the JSON file:
  tokens    of the prompt, in chunks of `--chunk`
  link      GB/s; resident: share of the experts that lie on the device
  cpu       the kernels on the host. none: all that is missing is copied; pairs: each pair reads its expert again, .128
            ms, the rival's figure; reuse: an expert is read once, by all its pairs
  seconds   of the prefill; in, device, cpu_busy: parts of it in which link to the device, device and CPU work
  longest   the busiest of these over the whole; copied: experts, a layer
  rival     seconds, published
"""

from collections.abc import Iterator

from umbra.base.errors import run_main
from umbra.planner.benchmarks.card_validation import PREFILLS
from umbra.planner.card import resident_share
from umbra.planner.machine import Hardware, read_hardware
from umbra.planner.served import NumberedModel, named
from umbra.planner.streamed_prefill import CpuRates, SimulatedPrefill, cpu_rates
from umbra.planner.streams import CPU, DEVICE, LINK_IN
from umbra.tools.benchmarks.output import Columns, Row, flags, printed, write_rows

PAIR_S = 0.128e-3  # 33 ms a token of 258 pairs: cann-recipes-infer, dsv4_flash_single_card_design.md
COLUMNS: Columns = (
    ("tokens", "tokens", 7, ""),
    ("link", "link", 6, ".0f"),
    ("resident", "resident", 10, ".0%"),
    ("cpu", "cpu", 7, ""),
    ("seconds", "seconds", 9, ".2f"),
    ("in", "in", 6, ".0%"),
    ("device", "device", 8, ".0%"),
    ("cpu_busy", "cpu", 6, ".0%"),
    ("longest", "longest", 9, ".0%"),
    ("copied", "copied", 8, ".0f"),
    ("rival", "rival", 7, ".1f"),
)


def rates(kernels: str, model: NumberedModel, hardware: Hardware) -> CpuRates:
    if kernels == "none":
        return CpuRates(1e6, 1e6)
    if kernels == "pairs":
        return CpuRates(0.0, PAIR_S)
    return cpu_rates(model, hardware)


def row(tokens: int, hardware: Hardware, share: float, kernels: str, chunk: int, warm: int) -> Row:
    model = named("deepseek_v4_flash", hardware)
    simulated = SimulatedPrefill(model, hardware, share, rates(kernels, model, hardware))
    for _ in range(warm):
        simulated.run(tokens, chunk)
    trace = simulated.run(tokens, chunk)
    facts = {
        "tokens": tokens,
        "link": hardware.need("host.copy_gbps"),
        "resident": share,
        "cpu": kernels,
        "seconds": trace.seconds,
        "longest": trace.overlap,
        "copied": simulated.copied / model.mixtures.layers,
    }
    facts |= {
        name: trace.busy(what) / trace.seconds
        for name, what in (("in", LINK_IN), ("device", DEVICE), ("cpu_busy", CPU))
    }
    return facts | ({"rival": PREFILLS[tokens]} if tokens in PREFILLS else {})


def rows(chunk: int, warm: int) -> Iterator[Row]:
    a3 = read_hardware("single_card_a3")
    fits = resident_share(named("deepseek_v4_flash", a3), a3, 1, max(PREFILLS)) or 0.0
    for gbps, share in ((27.0, 0.0), (27.0, fits), (110.0, fits)):
        for tokens in (16, 64, *PREFILLS):
            for kernels in ("none", "pairs", "reuse"):
                yield row(tokens, a3.with_link(gbps), share, kernels, chunk, warm)


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--chunk", type=int, default=32_768)
    parser.add_argument("--warm", type=int, default=1)
    args = parser.parse_args(argv)
    printed_rows = printed(rows(args.chunk, args.warm), COLUMNS)
    write_rows(args.json, printed_rows, chunk=args.chunk, warm=args.warm)


if __name__ == "__main__":
    run_main(main)
