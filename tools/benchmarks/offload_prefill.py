"""Prompts of several lengths with some experts on the device: milliseconds of a prompt and of a layer, beside the
planner's, and of a decode step.

    .venv/bin/umbra bench offload_prefill [CASE] [--share 25] [--tokens 512 2048] [--rounds 5]
                                                         [--set KEY=VALUE ...]

Random prompts, one at a time, in chunks of --chunk tokens. The experts on the device never change. Share 100 is a case
without shadow experts. A row, of the table and of `rows` in the JSON file:
  tokens      of the prompt
  best, ms    of all rounds, and their median, from the prompt to its first token
  rate        tokens a second, by the median
  layer       median milliseconds of a layer's mixture in these prompts, and the planner's two predictions: with the
              missing experts on the device too (`alone`), and on the CPU (`both`)
  step        median milliseconds of a decode step after a prompt of 16 tokens"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from umbra.executor.config.env import rank_env
from umbra.executor.config.load import load_case, load_model_config
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.model_runner import ModelRunner, make_runner
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows

DECODED = 32  # tokens, of which the first few are not timed
COLUMNS = (
    ("tokens", "tokens", 7, ""),
    ("best", "best", 10, ".1f"),
    ("ms", "ms", 10, ".1f"),
    ("rate", "tokens/s", 10, ".0f"),
    ("layer", "layer", 9, ".2f"),
    ("alone", "alone", 9, ".2f"),
    ("both", "both", 9, ".2f"),
    ("step", "step", 8, ".2f"),
)


def seconds(runner: ModelRunner, tokens: int, new: int, choose: torch.Generator) -> list[float]:
    """Returns the seconds of each step of a request with a random prompt."""
    ids = torch.randint(runner.config.vocab_size, (tokens,), generator=choose).tolist()
    runner.loop.submit(Request(tuple(ids), SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)))
    took = []
    while not runner.loop.idle:
        start = time.perf_counter()
        runner.loop.step()
        took.append(time.perf_counter() - start)
    return took


def measured(runner: ModelRunner, lengths: list[int], rounds: int) -> Iterator[Row]:
    choose, shadows = torch.Generator().manual_seed(0), runner.engine.shadows
    for tokens in lengths:
        seconds(runner, tokens, 1, choose)
        if shadows:
            shadows.forget()
        ms = [1e3 * sum(seconds(runner, tokens, 1, choose)) for _ in range(rounds)]
        middle = statistics.median(ms)
        row: Row = {"tokens": tokens, "best": min(ms), "ms": middle, "rate": 1e3 * tokens / middle}
        if shadows and runner.planned and shadows.history.long:
            compared = runner.planned.planner.compare_long(shadows.history.long)
            row |= {"layer": compared["measured_ms"], "alone": compared["streamed_ms"], "both": compared["computed_ms"]}
        steps = seconds(runner, 16, DECODED, choose)[4:]
        yield row | {"step": 1e3 * statistics.median(steps)}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("case", nargs="?", default="bench_30b_shape_cpu")
    parser.add_argument("--share", type=int, default=25, help="percent of the experts that are on the device")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 512, 2048])
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the case")
    args = parser.parse_args()
    keys = [f"input_max_len={max(args.tokens)}", f"max_new_tokens={DECODED}", "batch_size=1", f"threads={args.threads}"]
    keys += [f"chunked_prefill_size={args.chunk}", f"instruction_set={args.instruction_set}", *args.set]
    config = load_model_config(load_case(args.case, keys))
    slots = args.share * config.num_hidden_layers * config.expert_count // 100
    offload = ["offload_config.mode=fixed", f"offload_config.slots={slots}", "arena_mb=0", "max_swaps=-1"]
    case = load_case(args.case, [*keys, *(offload if args.share < 100 else ["offload_config.mode=none", "arena_mb=0"])])
    with TemporaryDirectory() as folder, torch.inference_mode():
        runner = make_runner(case, Path(folder), rank_env())
        runner.setup()
        rows = printed(measured(runner, args.tokens, args.rounds), COLUMNS)
    write_rows(args.json, rows, case=args.case, share=args.share, chunk=args.chunk)


if __name__ == "__main__":
    main()
