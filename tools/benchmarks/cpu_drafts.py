"""Measures decoding with drafts and without, on answers that quote their prompts and on others; both alternate step by
step.

    .venv/bin/umbra bench cpu_drafts [--case bench_30b_shape_cpu] [--layers 8] [--batches 1 4]
        [--drafts 7] [--rounds 3] [--json FILE]
        [--method mtp [--rates 0.5 0.7 0.85]] [--method eagle3 --head checkpoints/Qwen3-30B-A3B-eagle3]

Weights are random, so the model cannot write such answers: the engine computes and chooses as usual, and then every
token is replaced by that of a given answer. Prompts are 512 tokens of the demo's held-out text, answers 256:
  copy      the prompt
  edit      the prompt with every 20th token replaced
  summary   every third sentence of the prompt, again and again
  continue  the text that follows the prompt
  random    random tokens
With `--method mtp` or `eagle3` answers are random, and so many of the guesses of the model's layer, or of a head of the
sizes in the folder `--head`, are replaced by the right tokens, at each place after right ones: what each of `--rates`
says.

A row, of the table and of `rows` in the JSON file:
  batch      sequences that decode together
  answer     their answers
  plain      tokens a second without drafts, the median of the rounds; prefill is not counted
  drafts     the same with them
  ratio      the median of the rounds' ratios
  per_step   tokens of a sequence in a step with drafts
  accepted   accepted tokens of those that were drafted
  of count   `drafts` as a part of the tokens over the seconds of these steps' forward passes and guesses alone
"""

import functools
import itertools
import os
import random
import statistics
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from umbra.base.errors import run_main
from umbra.base.files import ROOT
from umbra.executor.config.env import rank_env
from umbra.executor.config.load import load_case
from umbra.executor.engine.drafts.drafts import DecodeCost, Drafts
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.engine import Engine
from umbra.executor.engine.step.loop import Loop
from umbra.executor.engine.step.model_drafts import ModelDrafter
from umbra.executor.engine.step.timings import Timings
from umbra.executor.model_runner import make_runner
from umbra.models.tokenizers import tokenizer_in
from umbra.tools.benchmarks.machine import seconds_of
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows
from umbra.tools.benchmarks.umbra_engine import with_experts

DEMO = ROOT / "checkpoints/austen_moe"
PROMPT, ANSWER, EDIT = 512, 256, 20
FAILED_GUESS = 4096  # of no answer
PARAMS = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
KINDS = ("copy", "edit", "summary", "continue", "random")
COLUMNS = (
    ("batch", "batch", 6, ""),
    ("answer", "answer", 10, ""),
    ("plain", "plain", 9, ".1f"),
    ("drafts", "drafts", 9, ".1f"),
    ("ratio", "ratio", 7, ".2f"),
    ("per_step", "a step", 8, ".2f"),
    ("accepted", "accepted", 10, ".2f"),
    ("of_count", "of count", 10, ".2f"),
)


@functools.cache
def text() -> tuple[list[int], set[int]]:
    """The held-out text as token ids, and the ids that end sentences."""
    tokenizer = tokenizer_in(DEMO)
    ids = tokenizer.encode((DEMO / "held_out.txt").read_text(), False)
    return ids, {id for id in set(ids) if tokenizer.decode([id]).strip() in (".", "!", "?")}


class Recorded(Drafts[Sequence]):
    """Drafts that add up the seconds of steps and of guesses."""

    total = 0.0

    def due(self) -> bool:
        due = super().due()
        self.measures = True
        return due

    def took(self, cost: DecodeCost) -> None:
        super().took(cost)
        self.total += cost.seconds + cost.guessed.seconds


class GuessedAt(ModelDrafter):
    """The model's guesses, of which a part is right."""

    def __init__(self, script: "Scripted"):
        super().__init__(script.engine)
        self.script, self.rate, self.draw = script, 0.0, random.Random(1)

    def guess(self, *args: Any) -> list[list[int]]:
        guessed = super().guess(*args)
        for sequence, guesses in zip((s for of in args[2] for s in of), guessed, strict=True):
            at = len(sequence.ids) - sequence.prompt_len
            known = self.script.answers[sequence.id][at : at + len(guesses)]
            for position in range(len(guesses)):
                right = position < len(known) and self.draw.random() < self.rate
                guesses[position] = known[position] if right else FAILED_GUESS
        return guessed


def answer_of(kind: str, prompt: list[int], start: int, generator: torch.Generator) -> list[int]:
    ids, ends = text()
    if kind == "random" or kind not in KINDS:
        return torch.randint(4096, (ANSWER,), generator=generator).tolist()
    if kind == "continue":
        return ids[start + PROMPT : start + PROMPT + ANSWER]
    if kind == "summary":
        sentences: list[list[int]] = [[]]
        for token in prompt:
            sentences[-1].append(token)
            if token in ends:
                sentences.append([])
        chosen = [token for sentence in sentences[::3] for token in sentence]
        return (chosen * (ANSWER // len(chosen) + 1))[:ANSWER]
    answer = prompt[:ANSWER]
    if kind == "edit":
        answer[EDIT - 1 :: EDIT] = torch.randint(4096, (len(answer[EDIT - 1 :: EDIT]),), generator=generator).tolist()
    return answer


class Scripted:
    """An engine whose choices are replaced by the answers of its requests, by id."""

    def __init__(self, engine: Engine):
        self.engine, self.answers, self.ids = engine, dict[int, list[int]](), itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def choose(self, logits: Tensor, groups: Any) -> list[int]:
        self.engine.choose(logits, groups)
        return [
            (self.answers[s.id] + [0])[position]
            for s in groups[0]
            for position in range(len(s.ids) - s.drafted - s.prompt_len, len(s.ids) - s.prompt_len + 1)
        ]


def round_of(loops: dict[str, Loop], script: Scripted, kind: str, batch: int, number: int) -> dict[str, float]:
    """Seconds in which each loop decodes the same batch of answers, which differ from number to number. The loops take
    their steps in turns: this machine's speed changes from second to second."""
    for loop in loops.values():
        generator = torch.Generator().manual_seed(number)
        for i in range(batch):
            start = ((number * batch + i) * 997) % (len(text()[0]) - PROMPT - ANSWER)
            prompt = text()[0][start : start + PROMPT]
            sequence = loop.submit(Request(tuple(prompt), PARAMS), next(script.ids))
            script.answers[sequence.id] = answer_of(kind, prompt, start, generator)
        while loop.scheduler.waiting or not all(s.decoding for s in loop.scheduler.running):
            loop.step()
    seconds = dict.fromkeys(loops, 0.0)
    while not all(loop.idle for loop in loops.values()):
        for name, loop in loops.items():
            if not loop.idle:
                seconds[name] += seconds_of(loop.step)
    return seconds


def measure(engine: Engine, batch: int, kinds: ListOf[str], rounds: int) -> Iterator[Row]:
    script = Scripted(engine)
    loops = {name: Loop(script, frozenset()) for name in ("plain", "drafts")}  # type: ignore[arg-type]
    loops["plain"].scheduler.drafts = loops["plain"].speculation.drafter = None
    loop, tokens = loops["drafts"], batch * (ANSWER - 1)
    guessed = loop.speculation.drafter = GuessedAt(script) if loop.speculation.drafter else None
    for kind in kinds:
        drafts = loop.scheduler.drafts = Recorded(loop.scheduler.limits.draft_tokens)
        if guessed:
            guessed.rate = float(kind)
        round_of(loops, script, kind, batch, 0)  # captures graphs
        timings, drafts.total = Timings(), 0.0
        loop.timings = timings
        measured = [round_of(loops, script, kind, batch, number) for number in range(1, rounds + 1)]
        yield dict(
            batch=batch,
            answer=kind,
            **{name: statistics.median(tokens / seconds[name] for seconds in measured) for name in loops},
            ratio=statistics.median(seconds["plain"] / seconds["drafts"] for seconds in measured),
            per_step=rounds * (ANSWER - 1) / len(timings.pure_decode_steps),
            accepted=timings.accepted_tokens / max(timings.drafted_tokens, 1),
            of_count=drafts.total / sum(seconds["drafts"] for seconds in measured),
        )


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--case", default="bench_30b_shape_cpu")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--answers", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--drafts", type=int, default=7, help="draft_config.tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--method", choices=("lookup", "mtp", "eagle3"), default="lookup")
    parser.add_argument("--head", default="", help="draft_config.model_path")
    parser.add_argument("--rates", nargs="+", default=["0", "0.5", "0.7", "0.85"])
    args = parser.parse_args(argv)
    os.environ.setdefault("TQDM_DISABLE", "1")

    def rows_of(batch: int) -> Iterator[Row]:
        changes = dict(
            with_ckpt="false",
            threads=args.threads,
            instruction_set=args.instruction_set,
            batch_size=2 * batch,
            input_max_len=PROMPT,
            max_new_tokens=ANSWER,
        )
        given = dict(method=args.method, tokens=args.drafts, model_path=args.head)
        drafts = [f"draft_config.{key}={value}" for key, value in given.items() if value]
        runner = make_runner(
            load_case(args.case, [f"{key}={value}" for key, value in changes.items()] + drafts),
            Path("results"),
            rank_env(),
        )
        if args.layers is not None:
            runner.config = with_experts(runner.config, args.layers)
        runner.setup()
        kinds = args.answers if args.method == "lookup" else args.rates
        yield from measure(runner.engine, batch, kinds, args.rounds)

    rows = printed((row for batch in args.batches for row in rows_of(batch)), COLUMNS)
    write_rows(args.json, rows, case=args.case, layers=args.layers, threads=args.threads, drafts=args.drafts)


if __name__ == "__main__":
    run_main(main)
