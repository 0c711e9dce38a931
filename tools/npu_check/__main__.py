"""Checks an Ascend machine in stages and writes one report:  bash tools/npu_check.sh [--from STAGE] [--only STAGE]"""

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from umbra.base.errors import run_main
from umbra.base.files import ROOT
from umbra.tools.npu_check import report
from umbra.tools.npu_check.outcome import FAIL, PASS, Outcome
from umbra.tools.npu_check.ranks import rank_process
from umbra.tools.npu_check.session import run_stage
from umbra.tools.npu_check.stage import STAGES, Stage, find
from umbra.tools.npu_check.state import StageResults, facts
from umbra.tools.npu_check.worker import stage_process

REPORT = ROOT / "results" / "npu_check" / "report.md"


def parser() -> argparse.ArgumentParser:
    stages = "\n".join(f"  {s.number:2} {s.name:<12} {s.about}" for s in STAGES)
    options = argparse.ArgumentParser(
        prog="bash tools/npu_check.sh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Checks what only an Ascend machine can say, in stages, each in a process of its own:\n\n"
        f"{stages}\n\n"
        "Source CANN's set_env.sh first. No case can hang: one that does not end in time is cut off; its log stays.\n"
        "Started again, it goes on where it stopped: stages in which everything passed are not run again, unless the\n"
        "commit, the sources or a version has changed. Exit status: 0 if everything passed, and 1 if a case\n"
        "failed or was skipped.",
        epilog="The report has no prompts and no names of machines or users. Beside it, REPORT.logs has the logs.",
    )
    only = options.add_mutually_exclusive_group()
    only.add_argument(
        "--from", dest="first", metavar="STAGE", help="run this stage (name or number) and those after it"
    )
    only.add_argument("--only", metavar="STAGE", help="run this stage alone")
    options.add_argument("--report", type=Path, default=REPORT, help="the file to write (results/npu_check/report.md)")
    for flag in ("--stage", "--rank", "--events"):  # of the processes that this one starts
        options.add_argument(flag, help=argparse.SUPPRESS)
    return options


def main(argv: list[str]) -> None:
    args = parser().parse_args(argv)
    if args.stage:
        sys.exit(stage_process(args.stage, Path(args.events)))
    if args.rank:
        sys.exit(rank_process(args.rank, Path(args.events)))
    sys.exit(check(chosen(args.first, args.only), args.report.resolve()))


def chosen(first: str | None, only: str | None) -> list[Stage] | None:
    """The stages to run whatever is known of them; None: those that have not passed."""
    if only:
        return [find(only)]
    return [stage for stage in STAGES if stage.number >= find(first).number] if first else None


def check(selected: list[Stage] | None, path: Path) -> int:
    """Runs the stages and writes the report after each. -> exit status"""
    for ending in (signal.SIGTERM, signal.SIGHUP):  # so that the processes of a stage are ended too
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    logs = path.with_suffix(".logs")
    logs.mkdir(parents=True, exist_ok=True)
    now = facts()
    state, fake = StageResults(logs / "state.json", now), is_fake()
    if fake:
        print(report.FAKE)
    if state.changed:
        print(f"{state.changed} has changed since the last run: every stage runs again")
    outcomes: list[Outcome] = []
    for stage in STAGES:
        of_stage = state.stages.get(stage.name, [])
        passed = bool(of_stage) and all(o.result == PASS for o in of_stage)
        if stage in selected if selected is not None else not passed:
            of_stage = run_stage(stage, outcomes, logs)
            state.keep(stage.name, of_stage)
            print("\n".join(map(report.line, of_stage)), flush=True)
        elif of_stage:
            print(f"{stage.number:2} {stage.name:<12} as before: {report.tally(of_stage)}", flush=True)
        outcomes += of_stage
        report.write(path, now, outcomes, fake)
    print(f"{report.tally(outcomes)}. Report: {path}")
    if any(o.result == FAIL for o in outcomes):
        print(f"Logs: {logs}")
    complete = {o.stage for o in outcomes} == {stage.name for stage in STAGES} or selected is not None
    return 0 if complete and all(o.result == PASS for o in outcomes) else 1


def is_fake() -> bool:
    """Returns whether CANN is the fake of the tests, which can log its calls."""
    try:
        return hasattr(ctypes.CDLL("libascendcl.so"), "fake_log_start")
    except OSError:  # no CANN: stage 1 says so
        return False


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_main(main)
