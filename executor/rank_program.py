"""Runs one rank of one case:  CASE_NAME=demo .venv/bin/python run.py [--set section.key=value ...]

The launcher (launch/launch.py) starts this module for every rank of a case.
"""

import argparse
import os
from pathlib import Path

from umbra.base.errors import UserError, run_main
from umbra.base.files import write_json
from umbra.executor.config import env
from umbra.executor.config.case import Case
from umbra.executor.config.load import load_model_config
from umbra.executor.config.resolved import read_resolved
from umbra.executor.launch.preflight import check_prompts, check_ready
from umbra.executor.launch.rank import run_rank
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.plan.resolve import resolve
from umbra.executor.platform.registry import clear_graphs, start_environment
from umbra.executor.run.defaults import RUNNING, open_case


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override keys")
    parser.add_argument("--results", type=Path, help="folder of this run (default: results/CASE/TIME)")
    parser.add_argument("--clear-cache", action="store_true", help="remove the case's compiled graphs and stop")
    parser.add_argument("--plan", action="store_true", help="count memory, with shadow experts predict times, and stop")
    parser.add_argument("--resolved", type=Path, help=argparse.SUPPRESS)  # from a launcher, which has checked the case
    args = parser.parse_args(argv)
    if args.resolved:
        return generate(read_resolved(args.resolved), args.results, own_results=True)
    name = env.case_name()
    if not name:
        raise UserError("CASE_NAME is not set: CASE_NAME=demo .venv/bin/python run.py, or bash infer.sh demo")
    case = open_case(name, RUNNING, args.set)
    if args.clear_cache:
        print(f"{clear_graphs(case.name)} compiled graphs of case {case.name} removed")
        return
    load_model_config(case)  # refuse a wrong case before anything heavy is imported
    if args.plan:
        from umbra.executor.run.memory_report import show_plan

        return show_plan(case)
    check_prompts(case)
    check_ready(case)
    case = resolve(case)
    os.environ.update(start_environment(case.platform, platform_settings(case), os.environ))
    generate(case, args.results, own_results=False)


def generate(case: Case, results: Path | None, own_results: bool) -> None:
    """Runs the case's prompts on this rank; the first one reports."""

    def body(folder: Path, ranks: env.RankEnv) -> None:
        from umbra.executor.model_runner import make_runner
        from umbra.executor.run.report import print_report

        report = make_runner(case, folder, ranks).run()
        if ranks.rank == 0:
            path = folder / "report.json"
            print_report(report, path)
            write_json(path, report)

    run_rank(case, results, body, own_results)


if __name__ == "__main__":
    run_main(main)
