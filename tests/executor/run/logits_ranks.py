"""A job that writes the logits of several cases, one after another, so that its ranks import torch only once.

The argument is a JSON file, [[name, case, overrides, ids], ...]; rank 0 writes `name`.npz beside it. Where experts were
placed anew, `name`.json says what became of it.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

import numpy as np

from tests.ranks import join_once
from umbra.commands.logits import collect_logits, sized_for
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.engine.step.teacher_forcing import ForcedRun
from umbra.executor.launch.rank import run_rank
from umbra.executor.model_runner import make_runner


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    jobs = json.loads(args.jobs.read_text())

    def body(results: Path, ranks: RankEnv) -> None:
        join_once()
        for name, case_name, overrides, ids in jobs:
            case = sized_for(load_case(case_name, overrides), ids, args.steps)
            runner = make_runner(case, results, ranks)
            runner.setup()
            arrays = collect_logits(runner, ids, args.steps)
            if case.data_config.chunked_prefill_size:  # `collect_logits` prefills in one step
                forced = ForcedRun(runner.engine)
                for i, logits in enumerate(forced.add(ids, 1)):
                    arrays[f"prefill_{i}"][-1:] = logits
                forced.close()
            if ranks.rank == 0:
                np.savez(args.jobs.with_name(f"{name}.npz"), allow_pickle=False, **arrays)
                if placed := runner.engine.rebalancing:
                    graphs = getattr(runner.engine.decode_step, "graphs", ())
                    facts = {"placements": placed.report(), "graphs": len(graphs)}
                    args.jobs.with_name(f"{name}.json").write_text(json.dumps(facts))

    _, case_name, overrides, *_ = jobs[0]
    run_rank(load_case(case_name, overrides), args.results, body)


if __name__ == "__main__":
    main()
