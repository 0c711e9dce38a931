"""Makes calls fail, one after the other, and judges what follows:  python -m tests.faults [--most N] [--only NAME]

Each point is one call of one kind in one scenario. A process is forked that runs the scenario while this call fails,
and then another one that runs it again. The first must have the usual answer, as if nothing had happened, or end with
one line of error that names the cause; the second must have the usual answer; and no file may be left half-written.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.forks import sample
from tests.faults.preload import LIBRARY, Faults, with_faults
from tests.faults.scenarios import KEPT, SCENARIOS, Outcome, Scenario
from umbra.ops.cpu.engine import module

FILES = r"rank0\.log|stacks0\.log|case\.json|report\.json|offload\.png|offload_trace\.json"
LEFT = re.compile(rf"results(/tiny(/\d+-\d+(-\d+)?(/({FILES}))?)?)?$")
FINE = ("answered", "refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, help="calls of each kind that are tried, evenly over all, from --seed on")
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--only", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="only these kinds of calls")
    parser.add_argument("--n", type=int, help="only this call of each kind")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        if LIBRARY not in os.environ:
            command, environment = with_faults(["-m", "tests.faults", *sys.argv[1:]], Path(folder))
            sys.exit(subprocess.run(command, env=environment).returncode)
        complaints = sum(turn(Path(folder) / name, name, args) for name in args.only)
    print(f"{complaints} complaints (--seed {args.seed})")
    sys.exit(complaints > 0)


def turn(folder: Path, name: str, args: argparse.Namespace) -> int:
    """All points of one scenario. -> the number of complaints"""
    start = time.process_time()
    faults, complaints = Faults(), 0
    scenario = SCENARIOS[name](folder, faults)
    module.instruction_sets()  # loads it here: the library must know where it lies in all forks
    faults.arm(folder)
    scenario.run()
    counts = faults.counts
    for kind in scenario.kinds:
        if args.kinds and kind not in args.kinds:
            continue
        verdicts: Counter[str] = Counter()
        points = [args.n] if args.n else sample(counts[kind], args.most or counts[kind], args.seed)
        for n in points:
            for forever in (False, True) if kind == "write" else (False,):
                verdict = judge(scenario, kind, n, forever)
                verdicts[verdict.partition(":")[0]] += 1
                if verdict not in FINE:
                    complaints += 1
                    whole = verdict.replace("\n", "\n    ") if args.n else " ".join(verdict.split())[-600:]
                    print(f"  {name}, {kind} {n}{' and later' if forever else ''}: {whole}", flush=True)
        if not points:
            print(f"{name}: {kind}: never called", flush=True)
        else:
            told = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))
            print(f"{name}: {kind}: {len(points)} of {counts[kind]}: {told}", flush=True)
    print(f"{name}: {time.process_time() - start:.0f} s", flush=True)
    return complaints


def judge(scenario: Scenario, kind: str, n: int, forever: bool) -> str:
    """Runs the scenario while the n-th call of a kind fails, and once more. -> "answered": the usual answer in spite of
    it; "refused": one line of error; otherwise what is wrong"""
    faults = scenario.faults
    scenario.restore()
    faults.arm(scenario.root, kind, n, forever)
    outcome = scenario.run()
    happened, what, error = faults.happened, faults.what, os.strerror(faults.block.error)
    judged = happened or outcome.ended.hung
    verdict = wrong = _verdict(scenario, outcome, kind, what, error, forever) if judged else "answered"
    if verdict in FINE:
        wrong, state = _left(scenario, outcome), scenario.state()
        if not wrong and state not in scenario.starts:  # else it has been started from the same files
            faults.arm(scenario.root)
            again = scenario.run()
            if again.answer != scenario.usual:
                wrong = f"next start: {again.ended} {again.told}"
            else:
                wrong = _left(scenario, again)
                scenario.starts.add(state)
    return wrong or verdict


def _verdict(scenario: Scenario, outcome: Outcome, kind: str, what: str, error: str, forever: bool) -> str:
    ended = outcome.ended
    if ended.hung:
        return f"hung: {ended.err[-3000:]}"
    if not ended.status:
        if outcome.answer != scenario.usual:
            return f"wrong answer: {outcome.answer}: {ended.out[-500:]} {ended.err[-500:]}"
        return f"traceback: {ended.err[-2500:]}" if "Traceback" in ended.err else "answered"
    if ended.status < 0:
        return f"killed: signal {-ended.status}, {what}: {ended.err.partition('Extension modules')[0][-9000:]}"
    said = [line for line in ended.errors if line.startswith("error: ")]
    if len(said) != 1 or {*ended.errors} != {*said}:
        return f"no line: status {ended.status}: {ended.out[-500:]} {ended.err[-2500:]}"
    if ended.status not in (1, 2):
        return f"status: {ended.status}"
    # safetensors says of every file that it cannot open that there is none.
    named = [error] + ["memory"] * (kind in ("new", "tensor", "mmap")) + ["cannot be opened"] * (kind == "open")
    named += ["the connection to a rank"] * (kind == "send")
    if not any(text in said[0] for text in named):
        return f"cause: {error}: {what}: {said[0]}"
    nameless = forever or not what.startswith("/") or "out of memory" in said[0]
    if not nameless and Path(what).name not in said[0] and str(Path(what).parent) not in said[0]:
        return f"file: {what}: {said[0]}"
    return "refused"


def _left(scenario: Scenario, outcome: Outcome) -> str:
    for path in scenario.left():
        name = str(path.relative_to(scenario.root))
        if Path(name).parts[0] in KEPT and ".tmp" not in name:
            continue  # whether it is whole, the next start shows
        if not LEFT.match(name):
            return f"left: {name}"
        if name.endswith(".json"):
            json.loads(path.read_text())
    return ""


if __name__ == "__main__":
    main()
