"""Checks a machine with an NVIDIA GPU in stages and writes one report:  bash tools/gpu_check.sh [--only STAGE,..]"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from umbra.base.errors import run_main
from umbra.base.files import ROOT
from umbra.tools.gpu_check.session import run_stage
from umbra.tools.gpu_check.stage import STAGES, GpuStage, chosen
from umbra.tools.npu_check.events import Events
from umbra.tools.npu_check.outcome import FAIL, PASS, SKIPPED, Outcome

REPORT = ROOT / "results" / "gpu_check" / "report.json"
SECONDS = 480.0


def parser() -> argparse.ArgumentParser:
    stages = "\n".join(f"  {s.name:<10} {s.about}{'' if s.default else ' (only if named)'}" for s in STAGES)
    arguments = argparse.ArgumentParser(
        prog="bash tools/gpu_check.sh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Checks what only a machine with a GPU can say, in stages, each in a process of its own:\n\n"
        f"{stages}\n\nNo stage can hang: one that does not end in time is ended. Exit status: 0 if everything passed.",
    )
    arguments.add_argument("--only", metavar="STAGE,..", help="run these stages, in this order")
    arguments.add_argument("--seconds", type=float, default=SECONDS, help=f"most seconds of all stages ({SECONDS:.0f})")
    arguments.add_argument(
        "--report", type=Path, default=REPORT, help="the JSON to write; a table .md and .log lie beside it"
    )
    for flag in ("--stage", "--events"):  # of the processes that this one starts
        arguments.add_argument(flag, help=argparse.SUPPRESS)
    return arguments


def main(argv: list[str]) -> None:
    args = parser().parse_args(argv)
    if args.stage:
        from umbra.tools.gpu_check.worker import stage_process

        stage_process(chosen(args.stage)[0], Events(Path(args.events)))
    sys.exit(check(chosen(args.only), args.report.resolve(), args.seconds))


def check(stages: list[GpuStage], path: Path, seconds: float) -> int:
    """Runs the stages, prints and writes the outcomes after each. -> exit status"""
    logs, begun = path.with_suffix(".logs"), time.monotonic()
    logs.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for stage in stages:
        results = run_stage(stage, logs, seconds - (time.monotonic() - begun))
        print("\n".join(map(line, results)), flush=True)
        outcomes += results
        write(path, outcomes)
        files = (logs / f"{one.name}.log" for one in stages)
        path.with_suffix(".log").write_text(
            "".join(f"==== {file.stem}\n{file.read_text(errors='replace')}" for file in files if file.is_file())
        )
    counts = ", ".join(f"{sum(o.result == r for o in outcomes)} {r}" for r in (PASS, FAIL, SKIPPED))
    print(f"{counts} in {time.monotonic() - begun:.0f} s. Report: {path}")
    return 0 if all(o.result == PASS for o in outcomes) else 1


def line(outcome: Outcome) -> str:
    lines = [f"{outcome.result:<8}{outcome.stage:<10}{outcome.case:<28}{outcome.seconds:7.1f} s  {outcome.text}"]
    return "\n".join(lines + [f"          {name}: {json.dumps(value)}" for name, value in outcome.measured.items()])


def write(path: Path, outcomes: list[Outcome]) -> None:
    path.write_text(json.dumps([outcome.to_json() for outcome in outcomes], indent=1))
    rows = [
        f"| {o.stage} | {o.case} | {o.result} | {o.seconds:.1f} | {o.text.replace('|', '/')} |"
        f" {json.dumps(o.measured) if o.measured else ''} |"
        for o in outcomes
    ]
    head = "| stage | case | result | s | text | measured |\n|---|---|---|---|---|---|"
    path.with_suffix(".md").write_text("\n".join([head, *rows]) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_main(main)
