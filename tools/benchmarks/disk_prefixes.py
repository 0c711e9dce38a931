"""The time to the first token of a prompt whose beginning an earlier server has left on disk, beside computing it.

    .venv/bin/umbra bench disk_prefixes [CASE] [--tokens 512 2000 8000] [--rounds 3] [--json FILE]

Three servers of the case, with random weights, each in a fresh process: the first computes all prompts and writes their
pages; the second finds these in the page cache of the system, and then the same ones in its own memory; for the third
the system has dropped the files. A row, with medians of the rounds in ms:
  tokens      of the prefix that prompts share; each has a question of its own behind it
  computed    nothing is known of the prompt
  memory      the prefix is in the KV cache
  cached      it is on disk, and in the system's page cache
  disk        it is on disk alone
  ratio       of `cached` to `computed`
  mb          on disk, for a prefix
"""

import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from umbra.base.errors import run_main
from umbra.executor.config.env import rank_env
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.request import SamplingParams
from umbra.executor.model_runner import make_runner
from umbra.serving.ranks.messages import ChannelMessage, Out, Submit
from umbra.serving.ranks.worker import Worker
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows
from umbra.tools.benchmarks.umbra_engine import with_experts

QUESTION = 32  # tokens
PATIENCE_S = 60.0


class Asker:
    """Stands for the front of a server: sends a request, and waits for its first token."""

    behind = False

    def __init__(self, settings: Sequence[str], case: str, layers: int | None):
        runner = make_runner(load_case(case, list(settings)), Path("results"), rank_env())
        if layers:
            runner.config = with_experts(runner.config, layers)
        runner.setup()
        self.vocabulary = runner.config.vocab_size
        self.messages: list[Any] = []
        self.first = False
        self.number = 0
        self.worker = Worker(runner, self)
        self.worker.warm_up()
        self.worker.open_disk()
        self.flush()

    def send(self, message: ChannelMessage) -> None:
        self.first = self.first or isinstance(message, Out)

    def receive(self, wait_s: float) -> list[Any]:
        messages, self.messages = self.messages, []
        return messages

    def ask(self, tokens: int, prefix: int) -> float:
        """Milliseconds until the first token of a prompt that begins with so many tokens of the prefix `prefix`."""
        draw, self.number = random.Random(f"{tokens} {prefix}"), self.number + 1
        ids = [draw.randrange(self.vocabulary) for _ in range(tokens)]
        ids += [random.randrange(self.vocabulary) for _ in range(QUESTION)]
        self.messages.append(Submit(self.number, ids, SamplingParams(1, ignore_eos=True)))
        self.first, start = False, time.perf_counter()
        while not self.first:
            self.worker.turn()
        seconds = time.perf_counter() - start
        while not self.worker.loop.idle:
            self.worker.turn()
        self.flush()  # the case has room for one sequence in memory
        return 1e3 * seconds

    def flush(self) -> None:
        if self.worker.disk:
            self.worker.disk.finish(PATIENCE_S)


def times(
    settings: Sequence[str], case: str, layers: int | None, prefixes: Sequence[tuple[int, int]], twice: bool
) -> list[list[float]]:
    """Returns the seconds that each of `prefixes` took; with `twice` a second time follows the first."""
    asker = Asker(settings, case, layers)
    return [[asker.ask(*prefix) for _ in range(1 + twice)] for prefix in prefixes]


def drop(folder: Path) -> None:
    """Lets the system's page cache forget the files."""
    for path in folder.rglob("*.pages"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(args: Any, folder: Path) -> list[Row]:
    longest = max(args.tokens) + QUESTION
    settings = [
        "with_ckpt=false",
        f"threads={args.threads}",
        f"instruction_set={args.instruction_set}",
        "batch_size=1",
        f"input_max_len={longest}",
        "max_new_tokens=2",
        f"cache_config.disk_path={folder}",
        *args.set,
    ]
    prefixes = [(tokens, prefix) for prefix in range(args.rounds) for tokens in args.tokens]
    runs, sizes = [], 0.0
    for number in range(3):
        if number == 2:
            sizes = sum(path.stat().st_size for path in folder.rglob("*.pages")) / 1e6
            drop(folder)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            runs.append(pool.apply(times, (settings, args.case, args.layers, prefixes, number == 1)))
    rows = []
    for tokens in args.tokens:
        at = [index for index, (count, _) in enumerate(prefixes) if count == tokens]
        computed, cached, disk = (statistics.median(run[i][0] for i in at) for run in runs)
        memory = statistics.median(runs[1][i][1] for i in at)
        row = {"tokens": tokens, "computed": computed, "memory": memory, "cached": cached, "disk": disk}
        mb = sizes * tokens / sum(count for count, _ in prefixes)
        rows.append(row | {"ratio": cached / computed, "mb": mb})
    return rows


COLUMNS = [
    ("tokens", "tokens", 8, ""),
    ("computed", "computed", 10, ".0f"),
    ("memory", "memory", 8, ".1f"),
    ("cached", "cached", 8, ".0f"),
    ("disk", "disk", 8, ".0f"),
    ("ratio", "ratio", 7, ".3f"),
    ("mb", "mb", 8, ".1f"),
]


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("case", nargs="?", default="bench_30b_shape_cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2000], help="of prefixes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, help="default: the checkpoint's")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the case")
    parser.add_argument("--folder", type=Path, help="for the files, which stay there; default: a temporary one")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="disk-prefixes-") as temporary:
        rows = printed(measured(args, (args.folder or Path(temporary)).absolute()), COLUMNS)
    write_rows(args.json, rows, case=args.case, layers=args.layers)


if __name__ == "__main__":
    run_main(main)
