"""A job whose rank 1 fails in the way its argument names while the others wait for it in a collective."""

import argparse
import os
import signal
from pathlib import Path

import torch

from umbra.base.errors import UserError
from umbra.executor.config.env import RankEnv
from umbra.executor.config.resolved import read_resolved
from umbra.executor.launch.join import init_parallel
from umbra.executor.launch.rank import run_rank
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.platform.registry import load_platform


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("raise", "kill", "user_error"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--resolved", type=Path)
    args = parser.parse_args()
    case = read_resolved(args.resolved)

    def body(results: Path, ranks: RankEnv) -> None:
        platform = load_platform(case.platform)(platform_settings(case), ranks)
        world = init_parallel(case, ranks, platform).world
        world.all_reduce(torch.ones(1))
        if ranks.rank == 1:
            if args.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if args.how == "user_error":
                raise UserError("the cup is empty")
            raise RuntimeError("boom on rank 1")
        world.all_reduce(torch.ones(1))

    run_rank(case, args.results, body)


if __name__ == "__main__":
    main()
