"""Starting jobs as a user does, and what happens when a rank fails or the input is bad."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from executor.config.load import load_case
from executor.launch.launch import _cause
from executor.launch.processes import is_running
from executor.model_runner import make_runner
from tests.nodes import until
from tests.ranks import free_port, launch_ranks
from tests.tiny import ONE_RANK, save_tiny, write_case
from tests.variants import thorough_but
from umbra.files import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.beside]


@pytest.mark.parametrize(
    ("left", "status", "said"),
    [
        ({"message": {"message": "a\nb", "extraInfo": {"timestamp": "1", "py_callstack": "x"}}}, 2, "a b"),
        ({"message": "why", "timestamp": 1}, 2, "rank 0 (pid 5) failed: exit status 2; all ranks' logs: "),
        ({"message": {"extraInfo": {"timestamp": 1}}}, 1, "rank 0 (pid 5) failed: exit status 1; all ranks'"),
    ],
)
def test_whatever_a_rank_leaves_is_one_line(tmp_path: Path, left: object, status: int, said: str) -> None:
    (tmp_path / "error.json").write_text(json.dumps(left))
    failure = ProcessFailure(0, 5, status, str(tmp_path / "error.json"))
    cause = _cause(ChildFailedError("rank", {0: failure}), tmp_path, None, {})
    assert cause.text.startswith(said)
    assert "\n" not in cause.text
    assert cause.status in (1, 2)


RESULTS = ROOT / "results"


def infer(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "infer.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=os.environ | environment)


def folders(case: str) -> set[Path]:
    return set((RESULTS / Path(case).stem).glob("*"))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of cases under names of their own, so that no other test writes into their folders of results."""
    folder = tmp_path_factory.mktemp("cases")
    for name in ("demo", "demo_tp8"):
        shutil.copy(ROOT / "yaml_configs" / f"{name}.yaml", folder / f"launch_{name}.yaml")
    return folder


@pytest.fixture(scope="module")
def demo(cases: Path) -> str:
    return str(cases / "launch_demo.yaml")


@pytest.fixture(scope="module")
def demo_tp8(cases: Path) -> str:
    return str(cases / "launch_demo_tp8.yaml")


def assert_one_error_line(done: subprocess.CompletedProcess[str], complaint: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert complaint in done.stderr


FOUR = ["world_size=4", "attn_tp_size=4", "embed_tp_size=4", "lmhead_tp_size=4"]  # test_parallel.py has all eight


@pytest.mark.parametrize(("name", "ranks"), [("demo", 1), pytest.param("demo_tp8", 4, marks=pytest.mark.thorough)])
def test_demo_answers_and_reports(cases: Path, name: str, ranks: int) -> None:
    case = str(cases / f"launch_{name}.yaml")
    before = folders(case)
    split = FOUR if ranks == 4 else []
    done = infer(case, "--set", "max_new_tokens=6", "sampling_config.ignore_eos=true", "dtype=float32", *split)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr  # no progress bars where there is no terminal
    (folder,) = folders(case) - before
    report = json.loads((folder / "report.json").read_text())
    wanted = {
        "case", "platform", "exe_mode", "world_size", "completions", "ttft_ms", "tpot_ms_p50", "tpot_ms_p99",
        "prefill_tokens_per_s", "decode_tokens_per_s", "peak_memory_bytes", "versions",
    }  # fmt: skip
    assert wanted <= report.keys()
    assert (report["case"], report["world_size"]) == (f"launch_{name}", ranks)
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


@pytest.mark.thorough
def test_data_parallel_chunked_prefill_answers_as_one_rank(demo: str, tmp_path: Path) -> None:
    greedy = ["exe_mode=eager", "method=none", "dtype=float32", "temperature=0", "max_new_tokens=12"]
    split = ["world_size=2", "attn_tp_size=1", "moe_tp_size=1", "chunked_prefill_size=3"]
    before = folders(demo)
    done = infer(demo, "--set", *greedy, *split)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = folders(demo) - before
    reports = (
        json.loads((folder / "report.json").read_text()),
        make_runner(load_case(demo, greedy), tmp_path, ONE_RANK).run(),
    )
    split_answers, answers = ([(c["tokens"], c["finish_reason"]) for c in report["completions"]] for report in reports)
    assert split_answers == answers


def test_progress_bars_on_a_terminal() -> None:
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    job = subprocess.Popen(
        ["bash", "infer.sh", "demo", "--set", "max_new_tokens=20"], cwd=ROOT, stdout=inside, stderr=inside
    )
    os.close(inside)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal hangs up when the job ends
        while data := os.read(terminal, 65536):
            shown += data
    os.close(terminal)
    assert job.wait(timeout=120) == 0, shown
    bars = [line.split(b":")[0] for line in shown.split(b"\r") if b"%|" in line]
    assert {b"loading", b"generating"} <= set(bars)


def test_list_shows_every_case() -> None:
    done = infer("--list")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == sorted(p.stem for p in (ROOT / "yaml_configs").glob("*"))


def test_bad_case_and_bad_key_leave_nothing_behind(demo: str, demo_tp8: str) -> None:
    before = folders(demo), folders(demo_tp8)
    assert_one_error_line(infer("demmo"), "no case 'demmo'")
    assert_one_error_line(infer(demo, "--set", "max_new_token=1"), "did you mean 'max_new_tokens'?")
    assert_one_error_line(infer(demo, "--set", "input_max_len=2"), "tokens, input_max_len is 2")
    assert_one_error_line(infer(demo, WORLD_SIZE="eight"), "WORLD_SIZE='eight' is not an integer")
    assert_one_error_line(infer(demo_tp8, NNODES="3"), "NNODES=3 also needs MASTER_ADDR and MASTER_PORT")
    where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    assert_one_error_line(infer(demo_tp8, NNODES="3", **where), "NNODES=3 does not divide world_size: 8")
    assert_one_error_line(infer(demo, NNODES="2", **where), "NNODES=2 does not divide world_size: 1")
    assert (folders(demo), folders(demo_tp8)) == before
    assert not (RESULTS / "demmo").exists()


def test_run_py_alone_says_what_it_needs() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "CASE_NAME"}
    command = [sys.executable, "run.py"]
    alone = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert_one_error_line(alone, "CASE_NAME is not set")
    environment["CASE_NAME"] = "demo_tp8"
    alone = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert_one_error_line(alone, "world_size: 8, but this process is one of 1")


@pytest.mark.parametrize("ranks", thorough_but([1, 2], 2))
def test_damaged_checkpoint_is_one_line_and_leaves_nothing(tmp_path: Path, ranks: int) -> None:
    save_tiny(tmp_path / "model", vocab_size=4096)  # the tokenizer's
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    case = write_case(
        tmp_path / "damaged.yaml", tmp_path / "model", world_size=ranks, model_config={"with_ckpt": True},
        data_config={"prompts": ["x"]},
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((ROOT / "checkpoints/austen_moe" / name).read_bytes())
    assert_one_error_line(infer(str(case)), "model.safetensors: truncated or corrupt")
    assert folders("damaged") == set()


@pytest.mark.parametrize(
    ("length", "file"),
    [(2, r"(report\.json|rank0\.log)"), pytest.param(200, r"rank0\.log", marks=pytest.mark.thorough)],
)
def test_full_disk_is_one_line(demo: str, length: int, file: str) -> None:
    """A file-size limit of one block stands in for a full disk: the report does not fit, or else the log.

    With two tokens which one is first depends on how long the path of this folder is, which the log shows."""
    before = folders(demo)
    command = f"ulimit -f 1; exec bash infer.sh {demo} --set max_new_tokens={length}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert_one_error_line(done, "cannot be written: File too large")
    assert re.search(f"{file}: cannot be written", done.stderr), done.stderr
    assert folders(demo) == before


@pytest.mark.parametrize("room", [0, 1, 15, 16, 17, 30])  # each line has 16 bytes
def test_complaints_reach_the_terminal_when_the_log_fills_up(tmp_path: Path, room: int) -> None:
    """Errors are printed however many bytes of a line still fit; other output fails once."""
    code = f"""
    import resource, sys
    from pathlib import Path
    from executor.launch.results import open_log
    open_log(Path({str(tmp_path)!r}), 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))
    print("error: the disk", file=sys.stderr)
    try:
        print("a line of print")
    except Exception as error:
        print(type(error).__name__, file=sys.stderr)
    print("more")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "error: the disk\nUserError\n", "more\n")
    assert (tmp_path / "rank0.log").stat().st_size <= room


@pytest.mark.parametrize("how", thorough_but(["raise", "kill", "user_error"], "raise"))
def test_failing_rank_ends_the_job_and_is_named(demo: str, how: str) -> None:
    program = ["tests/executor/launch/rank_program.py", demo, how]
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


def test_killing_a_rank_ends_the_job(demo: str) -> None:
    before = folders(demo)
    job = subprocess.Popen(
        ["bash", "infer.sh", demo, "--set", "world_size=2", "max_new_tokens=1500", "ignore_eos=true"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        victim = next(pid for pid in wait_for_ranks(job, 2) if rank_of(pid) == "1")
        (folder,) = folders(demo) - before
        deadline = time.monotonic() + 120
        log = folder / "rank1.log"
        while not (log.exists() and "model ready" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        time.sleep(1)
        os.kill(victim, signal.SIGKILL)
        _, errors = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode not in (0, None)
    assert f"error: rank 1 (pid {victim}) failed: killed by SIGKILL" in errors
    assert not any(rank_of(pid) for pid in descendants(job.pid))


def test_ranks_end_with_their_launcher(demo: str) -> None:
    before = folders(demo)
    job = subprocess.Popen(
        ["bash", "infer.sh", demo, "--set", "world_size=2", "max_new_tokens=1500", "ignore_eos=true"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    ranks = wait_for_ranks(job, 2)
    (folder,) = until(lambda: folders(demo) - before)
    log = folder / "rank1.log"
    until(lambda: log.exists() and "rank 1/2" in log.read_text())
    job.kill()
    job.wait()
    until(lambda: not any(is_running(pid) for pid in ranks), 20)


@pytest.mark.thorough
def test_two_nodes_make_one_job(demo: str) -> None:
    """Two launchers on this machine stand for two nodes."""
    before = folders(demo)
    common = dict(NNODES="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo")
    command = ["bash", "infer.sh", demo, "--set", "world_size=2", "exe_mode=eager"]
    command += ["max_new_tokens=3", "ignore_eos=true"]
    nodes = [
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | common | {"NODE_RANK": str(i)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for i in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    logs = sorted(p.name for folder in folders(demo) - before for p in folder.glob("rank*.log"))
    assert logs == [f"rank{i}.log" for i in range(2)]
    assert "2 rank(s)" in outputs[0]
    assert "rank(s)" not in outputs[1]  # only rank 0 reports


def wait_for_ranks(job: "subprocess.Popen[str]", count: int) -> list[int]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ranks = [pid for pid in descendants(job.pid) if rank_of(pid)]
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


def rank_of(pid: int) -> str:
    """The RANK in a process's environment, or nothing."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((e[5:].decode() for e in entries if e.startswith(b"RANK=")), "")
