"""What a decode step costs beside the model: scheduling, packing, choosing tokens, bookkeeping.

    .venv/bin/python -m benchmarks.cpu_steps [--case demo] [--batches 1 4 16 64] [--json FILE]

Sequences of random tokens are decoded through the engine's loop; a batch of each kind takes its steps in turn with the
others. A row, of the table and of `rows` in the JSON file:
  batch     sequences that decode together
  tokens    how they are chosen: the largest logit; sampled with temperature 0.7, or with top-k 20 and top-p 0.9 too;
            penalised: the largest logit with a frequency penalty
  step_us   median microseconds of a step
  model_us  the replay of the captured graph in it
  rest_us   median of the difference
  per_s     tokens a second
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.output import Row, flags, plot, printed, write_rows
from errors import run_main
from executor.config.env import RankEnv
from executor.config.load import load_case
from executor.engine.loop import Loop
from executor.engine.request import Request, SamplingParams
from executor.job.runner import make_runner
from executor.platform.cpu import DecodeGraph
from models.batch import Batch

PROMPT = 16
KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7},
    "top-k, top-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "penalised": {"frequency_penalty": 0.5},
}
COLUMNS = (
    ("batch", "batch", 6, ""), ("tokens", "tokens", 14, ""), ("step_us", "step us", 9, ".0f"),
    ("model_us", "model us", 10, ".0f"), ("rest_us", "rest us", 9, ".0f"), ("per_s", "tokens/s", 10, ".0f"),
)  # fmt: skip


class Clock:
    """Seconds of the replays of captured graphs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        replay = DecodeGraph.replay

        def timed(graph: DecodeGraph, batch: Batch) -> torch.Tensor:
            start = time.perf_counter()
            try:
                return replay(graph, batch)
            finally:
                self.seconds += time.perf_counter() - start

        DecodeGraph.replay = timed  # type: ignore[method-assign, assignment]


def measure(loop: Loop, clock: Clock, batch: int, steps: int) -> Iterator[Row]:
    """Rounds of steps of all kinds, until each has `steps`. A round first prefills, and its second step may capture."""
    vocabulary, longest = loop.engine.config.vocab_size, loop.engine.case.max_sequence_length
    generator = torch.Generator().manual_seed(batch)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    while len(times["greedy"]) < steps:
        for kind, settings in KINDS.items():
            for _ in range(batch):
                ids = tuple(torch.randint(vocabulary, (PROMPT,), generator=generator).tolist())
                params = SamplingParams(max_tokens=longest - PROMPT, ignore_eos=True, **settings)  # type: ignore[arg-type]
                loop.submit(Request(ids, params))
            loop.step()
            loop.step()
            while not loop.idle:
                clock.seconds, start = 0.0, time.perf_counter()
                loop.step()
                times[kind].append((time.perf_counter() - start, clock.seconds))
    for kind, measured in times.items():
        step = statistics.median(whole for whole, _ in measured)
        model, rest = (statistics.median(part) for part in ((m for _, m in measured), (w - m for w, m in measured)))
        yield dict(
            batch=batch, tokens=kind, step_us=step * 1e6, model_us=model * 1e6, rest_us=rest * 1e6, per_s=batch / step
        )


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--case", default="demo")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=400, help="of each row, at least")
    args = parser.parse_args(argv)
    clock, rows = Clock(), []

    def rows_of(batch: int) -> Iterator[Row]:
        changes = [f"data_config.batch_size={batch}", f"threads={args.threads}", "input_max_len=64", "warm_up=false"]
        case = load_case(args.case, [*changes, "max_new_tokens=64", f"instruction_set={args.instruction_set}"])
        with tempfile.TemporaryDirectory() as folder:
            runner = make_runner(case, Path(folder), RankEnv(0, 1, 0, 1, ""))
            runner.setup()
            yield from measure(runner.loop, clock, batch, args.steps)

    os.environ.setdefault("TQDM_DISABLE", "1")
    rows = printed((row for batch in args.batches for row in rows_of(batch)), COLUMNS)
    write_rows(args.json, rows, case=args.case, threads=args.threads)
    lines = {kind: (args.batches, [r["rest_us"] for r in rows if r["tokens"] == kind]) for kind in KINDS}
    plot(args.plot, {"sequences": lines}, "microseconds a step beside the model")


if __name__ == "__main__":
    run_main(main)
