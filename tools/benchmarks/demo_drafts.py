"""Measures decoding with drafts and without on the demo models' held-out text; both alternate every few steps.

    .venv/bin/umbra bench demo_drafts [--batches 1 4] [--rounds 12] [--tokens 256] [--only mtp]
        [--json FILE]

A row, of the table and of `rows` in the JSON file:
  method    mtp of demo_hybrid, eagle3 and lookup of demo
  batch     sequences that decode together, of prompts of 200 tokens
  draws     greedy, or with temperature 0.7 and top_p 0.9
  plain     tokens a second without drafts, the median of the rounds; prefill is not counted
  drafts    the same with them
  ratio     the median of the rounds' ratios
  per_step  tokens of a sequence in a step with drafts
  accepted  accepted tokens of those that were drafted
"""

import itertools
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from umbra.base.errors import run_main
from umbra.executor.config.env import rank_env
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.loop import Loop
from umbra.executor.engine.step.timings import Timings
from umbra.executor.model_runner import make_runner
from umbra.tools.benchmarks.cpu_drafts import DEMO, text
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows

METHODS = {
    "mtp": ("demo_hybrid", "draft_config.method=mtp"),
    "eagle3": ("demo", "draft_config.method=eagle3", f"draft_config.model_path={DEMO}_eagle3"),
    "lookup": ("demo", "draft_config.method=lookup"),
}
DRAWS = {"greedy": 0.0, "0.7": 0.7}
PROMPT, APART = 200, 701  # tokens of a prompt, and from the beginning of one to that of the next
TURN = 12  # steps
WARM = 2  # rounds, in which drafts learn what steps cost
COLUMNS = (
    ("method", "method", 8, ""),
    ("batch", "batch", 6, ""),
    ("draws", "draws", 8, ""),
    ("plain", "plain", 9, ".0f"),
    ("drafts", "drafts", 9, ".0f"),
    ("ratio", "ratio", 7, ".2f"),
    ("per_step", "a step", 8, ".2f"),
    ("accepted", "accepted", 10, ".2f"),
)


def loop_of(folder: Path, threads: int, tokens: int, batch: int, case: str, *drafting: str) -> Loop:
    sizes = f"threads={threads}", f"data_config.batch_size={batch}", f"data_config.max_new_tokens={tokens}"
    runner = make_runner(load_case(case, [*sizes, "data_config.input_max_len=512", *drafting]), folder, rank_env())
    runner.setup()
    return Loop(runner.engine, frozenset())


def begun(loop: Loop, prompts: list[list[int]], temperature: float, tokens: int) -> list[Sequence]:
    """The sequences of `prompts`, which have their first tokens."""
    sampling = [SamplingParams(tokens, temperature, top_p=0.9, seed=i, ignore_eos=True) for i in range(len(prompts))]
    asked = [loop.submit(Request(tuple(ids), how)) for ids, how in zip(prompts, sampling, strict=True)]
    while not all(sequence.decoding for sequence in asked):
        loop.step()
    return asked


def rates(loops: list[Loop], prompts: list[list[int]], temperature: float, tokens: int) -> list[float]:
    """Tokens a second of each of `loops`, which take turns of a few steps."""
    asked = [begun(loop, prompts, temperature, tokens) for loop in loops]
    left = [len(prompts) * tokens - sum(len(sequence.generated) for sequence in of) for of in asked]
    seconds = [0.0] * len(loops)
    order = list(enumerate(loops))
    while not all(loop.idle for loop in loops):
        order.reverse()
        for index, loop in order:
            since = time.perf_counter()
            for _ in range(TURN):
                if not loop.idle:
                    loop.step()
            seconds[index] += time.perf_counter() - since
    return [count / of for count, of in zip(left, seconds, strict=True)]


def measure(methods: list[str], threads: int, batches: list[int], rounds: int, tokens: int) -> Iterator[Row]:
    ids, _ = text()
    for method in methods:
        case, *drafting = METHODS[method]
        with TemporaryDirectory(prefix="umbra-drafts-") as folder:
            sizes = Path(folder), threads, tokens, max(batches), case
            loops = [loop_of(*sizes), loop_of(*sizes, *drafting)]
        for batch, (draws, temperature) in itertools.product(batches, DRAWS.items()):
            measured = []
            for number in range(-WARM, rounds):
                if number == 0:
                    loops[1].timings = Timings()
                places = [(number + WARM) * batch + i for i in range(batch)]
                prompts = [ids[APART * position % (len(ids) - PROMPT) :][:PROMPT] for position in places]
                measured.append(rates(loops, prompts, temperature, tokens))
            plain, drafts = zip(*measured[WARM:], strict=True)
            timings = loops[1].timings
            row: Row = {
                "method": method,
                "batch": batch,
                "draws": draws,
                "plain": statistics.median(plain),
                "drafts": statistics.median(drafts),
                "ratio": statistics.median(with_ / without for without, with_ in zip(plain, drafts, strict=True)),
                "per_step": rounds * (tokens - 1) / len(timings.pure_decode_steps),
            }
            if timings.drafted_tokens:
                row["accepted"] = timings.accepted_tokens / timings.drafted_tokens
            yield row


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--only", choices=METHODS)
    args = parser.parse_args(argv)
    os.environ["TQDM_DISABLE"] = "1"
    methods = [args.only] if args.only else list(METHODS)
    rows = printed(measure(methods, args.threads, args.batches, args.rounds, args.tokens), COLUMNS)
    write_rows(args.json, rows, threads=args.threads, rounds=args.rounds, tokens=args.tokens)


if __name__ == "__main__":
    run_main(main)
