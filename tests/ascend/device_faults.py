"""Makes calls to the fake NPU fail, one after the other:

    python -m tests.ascend.device_faults [--most N] [KEY=VALUE ...]

A call allocates, copies, launches or waits, from the load of a model to the end of its answers. For each of them a
process is forked that runs a case as a user does while this call fails. It must have the usual answer, or end with one
line of error that names the device's error, and leave nothing behind but its logs.
"""

import argparse
import functools
import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from executor.config.case import Case
from executor.config.env import RankEnv
from executor.config.load import load_case
from executor.launch import results
from executor.launch.rank import run_rank
from executor.model_runner import make_runner
from ops.ascend.shadow import ShadowNodes
from tests.ascend.engine import ascend_case, node
from tests.ascend.log import device_calls, fail_call
from tests.faults.forks import Ended, forked, sample, share_what_is_imported
from umbra.errors import run_main
from umbra.files import ROOT, write_json

LIMIT_S = 60.0  # on a machine that is busy
# The last two are all that torch_npu says where its queue met the error: of a kernel its name, of a copy its sizes.
NAMED = ("error code is 507000", "error code:507000", "error 507000", "memory", "the current working operator name is",
         "the current copy params are")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, help="calls that are tried, evenly over all")
    parser.add_argument("--n", type=int, help="only this call")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the case")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="device-faults-") as folder:
        complaints = turn(Path(folder) / "case", args.overrides, args.most, args.n)
    sys.exit(complaints > 0)


def turn(folder: Path, overrides: list[str], most: int | None, only: int | None = None) -> int:
    """-> the number of complaints"""
    folder.mkdir()
    ascend_case(folder, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "checkpoints/austen_moe" / name, folder / "model" / name)
    body = functools.partial(generate, folder, overrides)
    log = folder.with_suffix(".log")
    usual = share_what_is_imported(functools.partial(body, 0), log)
    assert not usual.status, usual
    answer = answer_of(folder)
    calls = int((folder / "calls").read_text())
    found: Counter[str] = Counter()
    for n in [only] if only else sample(calls, most or calls, 0):
        verdict = judge(forked(functools.partial(body, n), log, LIMIT_S), folder, answer)
        found[verdict.partition(":")[0]] += 1
        if verdict not in ("answered", "refused"):
            print(f"  call {n}: {verdict}", flush=True)
    told = ", ".join(f"{number} {verdict}" for verdict, number in sorted(found.items()))
    print(f"{' '.join(overrides)}: {found.total()} of {calls} calls: {told}", flush=True)
    return found.total() - found["answered"] - found["refused"]


def generate(folder: Path, overrides: list[str], n: int) -> None:
    """What run.py does, but for the settings of the environment, which the fake device has not."""
    setattr(results, "ROOT", folder)  # noqa: B010
    setattr(ShadowNodes, "_node", node)  # noqa: B010

    def main(_: list[str]) -> None:
        case = load_case(str(folder / f"{folder.name}.yaml"), ["ignore_eos=true", *overrides])
        fail_call(n)
        run_rank(case, None, functools.partial(reported, case))

    run_main(main)
    (folder / "calls").write_text(str(device_calls()))


def reported(case: Case, results: Path, ranks: RankEnv) -> None:
    write_json(results / "report.json", make_runner(case, results, ranks).run())


def answer_of(folder: Path) -> list[list[int]]:
    (path,) = folder.glob("results/*/*/report.json")
    answers = [completion["tokens"] for completion in json.loads(path.read_text())["completions"]]
    path.unlink()
    return answers


def judge(ended: Ended, folder: Path, answer: list[list[int]]) -> str:
    """-> "answered", "refused", or what is wrong"""
    if ended.hung:
        return f"hung: {ended.err[-3000:]}"
    if not ended.status:
        return "answered" if answer_of(folder) == answer else "wrong answer"
    lines = [line for line in ended.errors if line.startswith("error: ")]
    if ended.status not in (1, 2) or len(lines) != 1 or "Traceback" in ended.err:
        return f"no line: status {ended.status}: {ended.err[-3000:]}"
    if not any(word in lines[0] for word in NAMED):
        return f"cause: {lines[0]}"
    left = [*folder.rglob("*.tmp*"), *folder.glob("results/*/*/report.json")]
    return f"left: {left}" if left else "refused"


if __name__ == "__main__":
    main()
