"""A job whose ranks serve the prompts of a file, one after the other. Rank 0 writes the tokens and log-probabilities of
each answer, and how many tokens of the prompt were read from disk."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from tests.fakes.scripted import Script
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.request import SamplingParams
from umbra.executor.launch.rank import run_rank
from umbra.executor.model_runner import make_runner
from umbra.serving.ranks.messages import Stop, Submit
from umbra.serving.ranks.worker import Worker


class Front(Script):
    def __init__(self, prompts: list[list[int]]):
        super().__init__()
        self.left, self.asked = list(enumerate(prompts)), 0

    def receive(self, wait_s: float) -> list[Any]:
        if self.asked and not self.ended(self.asked - 1):
            return []
        if not self.left:
            return [Stop()]
        id, ids = self.left.pop(0)
        self.asked = id + 1
        return [Submit(id, ids, SamplingParams(8, ignore_eos=True, logprobs=1))]


class Restoring(Worker):
    """Reads what is on disk, however fast it computes."""

    def open_disk(self) -> None:
        super().open_disk()
        if self.disk and self.disk.store:
            self.disk.behind.flush(60)
            self.disk.decide = lambda prefill_rate, pause_s: 1000  # type: ignore[method-assign]


def main() -> None:
    _, case_file, prompts, out, _, folder = sys.argv
    case = load_case(case_file)

    def body(results: Path, ranks: RankEnv) -> None:
        runner = make_runner(case, results, ranks)
        runner.setup()
        front = Front(json.loads(Path(prompts).read_text()))
        Restoring(runner, front if ranks.rank == 0 else None).run()
        if ranks.rank == 0:
            rows = [front.rows(id) for id in range(front.asked)]
            answers = [[[row.tokens, row.logprobs] for row in of] for of in rows]
            Path(out).write_text(json.dumps([answers, [of[0].restored_tokens for of in rows]]))

    run_rank(case, Path(folder), body)


if __name__ == "__main__":
    main()
