"""A job that answers prompts in several cases, with drafts of which half are right.

The argument is a JSON file, [[name, case, overrides, texts], ...]: prompts with their answers; rank 0 writes
`name`.json beside it: the same as found, and the number of drafts that came true.
"""

import argparse
import json
import sys
from collections.abc import Sequence as ListOf
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from tests.fakes.drafts import HalfRight
from tests.ranks import join_once
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.launch.rank import run_rank
from umbra.executor.model_runner import ModelRunner, make_runner

NEW = 24


def answers(
    runner: ModelRunner, prompts: ListOf[list[int]], texts: ListOf[list[int]] = ()
) -> tuple[list[list[int]], int]:
    """Without `texts` there are no drafts."""
    loop = runner.loop
    loop.scheduler.drafts = HalfRight(texts) if texts else None
    asked = [loop.submit(Request(tuple(prompt), SamplingParams(max_tokens=NEW))) for prompt in prompts]
    while not loop.idle:
        loop.step()
    return [s.ids.tolist() for s in asked], loop.timings.accepted_tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    jobs = json.loads(args.jobs.read_text())

    def body(results: Path, ranks: RankEnv) -> None:
        join_once()
        for name, case, overrides, texts in jobs:
            runner = make_runner(load_case(case, overrides), results, ranks)
            runner.setup()
            outcome = answers(runner, [text[:-NEW] for text in texts], texts)
            if ranks.rank == 0:
                args.jobs.with_name(f"{name}.json").write_text(json.dumps(outcome))

    _, case, overrides, _ = jobs[0]
    run_rank(load_case(case, overrides), args.results, body)


if __name__ == "__main__":
    main()
