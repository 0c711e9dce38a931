"""Starting jobs as a user does, and what happens when a rank fails or the input is bad."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import until
from tests.ranks import launch_ranks
from tests.variants import thorough_but
from umbra.base.files import ROOT
from umbra.executor.launch.processes import is_running, rank_of

pytestmark = [pytest.mark.slow, pytest.mark.beside]


RESULTS = ROOT / "results"
WORKER = "launch_" + os.environ.get("PYTEST_XDIST_WORKER", "alone")


def infer(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "infer.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=os.environ | environment)


def folders(case: str) -> set[Path]:
    return set((RESULTS / Path(case).stem).glob("*"))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of cases under names of this worker's own, so that no other test writes into their folders of results."""
    folder = tmp_path_factory.mktemp("cases")
    for name in ("demo", "demo_tp8"):
        shutil.copy(ROOT / "yaml_configs" / f"{name}.yaml", folder / f"{WORKER}_{name}.yaml")
    return folder


@pytest.fixture(scope="module")
def demo(cases: Path) -> str:
    return str(cases / f"{WORKER}_demo.yaml")


@pytest.fixture(scope="module")
def demo_tp8(cases: Path) -> str:
    return str(cases / f"{WORKER}_demo_tp8.yaml")


def assert_one_error_line(done: subprocess.CompletedProcess[str], complaint: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert complaint in done.stderr


def test_demo_answers_and_reports(demo: str) -> None:
    before, ranks = folders(demo), 2
    done = infer(demo, "--set", "max_new_tokens=6", "sampling_config.ignore_eos=true", "dtype=float32", "world_size=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr  # no progress bars where there is no terminal
    (folder,) = folders(demo) - before
    report = json.loads((folder / "report.json").read_text())
    wanted = {
        "case",
        "platform",
        "exe_mode",
        "world_size",
        "completions",
        "ttft_ms",
        "tpot_ms_p50",
        "tpot_ms_p99",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "peak_memory_bytes",
        "versions",
    }
    assert wanted <= report.keys()
    assert (report["case"], report["world_size"]) == (Path(demo).stem, ranks)
    assert len(report["completions"]) == 4
    for completion in report["completions"]:
        assert completion.keys() == {"prompt", "text", "tokens", "finish_reason"}
        assert len(completion["tokens"]) == 6
        assert completion["prompt"] in done.stdout
        assert completion["text"] in done.stdout
    assert sorted(p.name for p in folder.glob("*.log")) == [f"rank{i}.log" for i in range(ranks)]
    for rank in range(ranks):
        assert "model ready" in (folder / f"rank{rank}.log").read_text()
    for words in ("time to first token", "time per token", "tokens/s", "peak memory", str(folder / "report.json")):
        assert words in done.stdout


def test_bad_case_and_bad_key_leave_nothing_behind(demo: str, demo_tp8: str) -> None:
    before = folders(demo), folders(demo_tp8)
    assert_one_error_line(infer("demmo"), "no case 'demmo'")
    assert_one_error_line(infer(demo, "--set", "input_max_len=2"), "tokens, input_max_len is 2")
    assert_one_error_line(infer(demo, WORLD_SIZE="eight"), "WORLD_SIZE='eight' is not an integer")
    where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    assert_one_error_line(infer(demo_tp8, NNODES="3", **where), "NNODES=3 does not divide world_size: 8")
    assert (folders(demo), folders(demo_tp8)) == before
    assert not (RESULTS / "demmo").exists()


@pytest.mark.thorough
def test_full_disk_is_one_line(demo: str) -> None:
    """A file-size limit stands in for a full disk: the report does not fit."""
    before = folders(demo)
    command = f"ulimit -f 3; exec bash infer.sh {demo} --set max_new_tokens=2"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert_one_error_line(done, "cannot be written: File too large")
    assert "report.json: cannot be written" in done.stderr
    assert folders(demo) == before


@pytest.mark.parametrize("how", thorough_but(["raise", "kill", "user_error"], "raise"))
def test_failing_rank_ends_the_job_and_is_named(demo: str, how: str) -> None:
    program = ["tests/executor/launch/rank_program.py", how]
    before = folders(demo)
    done = launch_ranks(demo, ["world_size=2", "exe_mode=eager"], program)
    if how == "user_error":
        assert_one_error_line(done, "error: the cup is empty")
        assert folders(demo) == before
        return
    assert done.returncode == 1, done.stderr
    assert "error: rank 1 (pid" in done.stderr
    if how == "raise":
        assert "tests/executor/launch/rank_program.py" in done.stderr  # the traceback itself
        assert "RuntimeError: boom on rank 1" in done.stderr
        (folder,) = folders(demo) - before
        assert "boom on rank 1" in (folder / "rank1.log").read_text()
    else:
        assert "killed by SIGKILL" in done.stderr


@pytest.mark.thorough
def test_ranks_end_with_their_launcher(demo: str) -> None:
    before = folders(demo)
    job = subprocess.Popen(
        ["bash", "infer.sh", demo, "--set", "world_size=2", "max_new_tokens=1500", "ignore_eos=true"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    ranks = wait_for_ranks(job, 2)
    (folder,) = until(lambda: folders(demo) - before)
    log = folder / "rank1.log"
    until(lambda: log.exists() and "rank 1/2" in log.read_text())
    job.kill()
    job.wait()
    until(lambda: not any(is_running(pid) for pid in ranks), 20)


@pytest.mark.thorough
def test_a_halted_rank_ends_its_job_and_is_named(tmp_path: Path) -> None:
    code = """
import sys, threading
from pathlib import Path
from torch.distributed.elastic.rendezvous import registry
from umbra.executor.launch.halts import Halts
from umbra.executor.launch.launch import run_ranks
command = ["sh", "-c", "test $RANK = 0 || kill -STOP $$$$; exec sleep 600"]
make, kept = registry.get_rendezvous_handler, []
registry.get_rendezvous_handler = lambda free_port: kept.append(make(free_port)) or kept[0]
print(run_ranks(command, 2, sys.argv[1], Path("results"), halts=Halts(0.5, 0.1)).text)
print(threading.active_count())  # kept.pop() would end the rendezvous' thread, if it is not that thread that does so
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    line = r"rank 1 \(pid \d+\) failed: halted by a signal for 0\.5 s; all ranks' logs: results\n1\n"
    assert re.fullmatch(line, done.stdout), done.stderr


def wait_for_ranks(job: "subprocess.Popen[str]", count: int) -> list[int]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ranks = [pid for pid in descendants(job.pid) if rank_of(pid) is not None]
        if len({rank_of(pid) for pid in ranks}) == count:
            return ranks
        assert job.poll() is None
        time.sleep(0.2)
    raise AssertionError("the ranks did not start")


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield int(child)
            yield from descendants(int(child))
