"""A job that writes the logits of several cases, one after another, so that its ranks import torch only once.

The argument is a JSON file, [[name, case, overrides, ids], ...]; rank 0 writes `name`.npz beside it.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

import numpy as np
from torch import distributed

from executor.config.env import RankEnv
from executor.config.load import load_case
from executor.job.logits import collect_logits, sized_for
from executor.job.rank import run_rank
from executor.job.runner import make_runner


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    jobs = json.loads(args.jobs.read_text())

    def body(results: Path, ranks: RankEnv) -> None:
        distributed.init_process_group("gloo")
        distributed.init_process_group = lambda *_, **__: None  # each case makes its own groups, but joins only once
        for name, case_name, overrides, ids in jobs:
            runner = make_runner(sized_for(load_case(case_name, overrides), ids, args.steps), results, ranks)
            runner.setup()
            arrays = collect_logits(runner, ids, args.steps)
            if ranks.rank == 0:
                np.savez(args.jobs.with_name(f"{name}.npz"), **arrays)

    _, case_name, overrides, _ = jobs[0]
    run_rank(load_case(case_name, overrides), args.results, body)


if __name__ == "__main__":
    main()
