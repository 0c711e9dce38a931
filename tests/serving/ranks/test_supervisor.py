"""Ranks that die, hang, differ or are refused: the front learns why, requests are told or served again, nothing stays
behind."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.ranks import free_port
from tests.tiny import save_tiny, write_case
from tests.variants import thorough_but
from umbra.base.errors import EXIT_STATUS
from umbra.base.files import ROOT
from umbra.executor.config.case import Case
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.request import SamplingParams
from umbra.executor.launch.processes import rank_of
from umbra.serving.ranks.client import EngineClient, EngineGone
from umbra.serving.ranks.launcher import launcher_of
from umbra.serving.ranks.messages import Submit
from umbra.serving.ranks.processes import processes_of
from umbra.serving.ranks.supervisor import Supervisor

pytestmark = [pytest.mark.slow, pytest.mark.beside]

LONG = [i % 90 for i in range(300)]  # prefilled in as many steps
ENDLESS = 7000  # tokens of answers that no rank ends before it is killed


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("supervised")
    unique = f"supervised{os.getpid()}"  # other processes of the tests have results as well
    save_tiny(folder / "model", num_key_value_heads=8, max_position_embeddings=8192)
    data = {"input_max_len": 300, "max_new_tokens": ENDLESS, "batch_size": 2, "chunked_prefill_size": 1}
    name = write_case(folder / f"{unique}.yaml", folder / "model", world_size=2, data_config=data, threads=1)
    yield str(name)
    shutil.rmtree(ROOT / "results" / unique, ignore_errors=True)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files; empty soon after the test: a launcher outlives its killed front a little."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    asyncio.run(until(lambda: not list(folder.iterdir())))


def launcher(case: Case, folder: Path, faulty: bool) -> list[str]:
    usual = launcher_of(case, folder)
    return ["tests/serving/ranks/faulty_ranks.py", *usual[2:]] if faulty else usual


@asynccontextmanager
async def served(folder: Path, case: str, *overrides: str, faulty: bool = False) -> AsyncIterator[Supervisor]:
    """A supervisor whose ranks take requests, or have failed. Whatever happens, none of them is left."""
    client = EngineClient(folder / "socket")
    await client.listen()
    opened = load_case(case, [*overrides])
    supervisor = Supervisor(opened, launcher(opened, folder, faulty), client)
    running = asyncio.create_task(supervisor.run())
    try:
        await until(lambda: client.serving or bool(supervisor.failed))
        yield supervisor
    finally:
        await supervisor.stop()
        await running
        client.close()
    assert not supervisor.processes()
    assert not client.path.exists()


async def until(condition: Callable[[], bool]) -> None:
    """Waits for `condition`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < 300
        await asyncio.sleep(0.01)


async def answer(
    client: EngineClient, ids: list[int], tokens: int, received: list[int] | None = None
) -> tuple[list[int], str]:
    """The tokens of a request, which are put into `received` as they come, and why it ended."""
    received = [] if received is None else received
    try:
        async for row in client.rows(Submit(client.next_id(), ids, SamplingParams(tokens, ignore_eos=True))):
            received += row.tokens
    except EngineGone as gone:
        return received, str(gone)
    return received, "whole"


def victim(supervisor: Supervisor, rank: int | None) -> int:
    return next(process.pid for process in supervisor.processes() if process.rank == rank)


@pytest.mark.parametrize("rank", thorough_but([1, None], 1))
def test_requests_when_a_process_is_killed(tmp_path: Path, temporary: Path, case: str, rank: int | None) -> None:
    """A rank's, or the launcher's. Two requests decode and one waits: that one is answered by the next ranks, the
    others are told why. Then the ranks leave together."""

    async def run() -> None:
        async with served(tmp_path, case, "serve_config.restarts=2") as supervisor:
            client, pid = supervisor.client, victim(supervisor, rank)
            rows: tuple[list[int], list[int]] = ([], [])
            begun = [asyncio.create_task(answer(client, [i], ENDLESS, own)) for i, own in enumerate(rows)]
            await until(lambda: all(rows))
            asked = asyncio.create_task(answer(client, LONG[:40], 3))
            await asyncio.sleep(0.03)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not client.serving)  # milliseconds on a machine that is idle
            tokens, why = await asked
            assert (tokens, why) == await answer(client, LONG[:40], 3)
            assert (len(tokens), why) == (3, "whole")
            who = "the launcher" if rank is None else f"rank {rank}"
            for tokens, why in [await task for task in begun]:
                assert 0 < len(tokens) < ENDLESS
                assert why == f"{who} (pid {pid}) failed: killed by SIGKILL"
            assert supervisor.restarts == 1
            await supervisor.stop()
        assert (supervisor.status, supervisor.failed) == (0, "")

    asyncio.run(run())
    if rank is None:  # nobody else knows the folders of the launcher that was killed
        shutil.rmtree(temporary)
        temporary.mkdir()


def fail(tmp_path: Path, program: str, world_size: int = 2) -> tuple[Supervisor, list[str]]:
    """Supervises a launcher that runs `program` in place of any ranks; it is started twice. -> what a person is told"""
    told: list[str] = []
    case = load_case("demo", [f"world_size={world_size}", "serve_config.restarts=1"])
    source = f"import os, sys, time; {program}"
    supervisor = Supervisor(case, ["-c", source], EngineClient(tmp_path / "socket"), told.append)
    asyncio.run(supervisor.run())
    return supervisor, told


WRITES = "os.write(2, {}); sys.exit({})"
ENDS = [  # what a launcher does, of how many ranks, and why they have failed
    (WRITES.format(b"error: rank 1 failed; all ranks' logs: /results/x\n", 1), 2, "rank 1 failed"),
    ("os.kill(os.getpid(), 9)", 1, r"rank 0 \(pid \d+\) failed: killed by SIGKILL"),
    ("os.kill(os.getpid(), 9)", 2, r"the launcher \(pid \d+\) failed: killed by SIGKILL"),
    ("sys.exit(3)", 2, "the ranks have ended with exit status 3"),
]


@pytest.mark.parametrize(("program", "world_size", "reason"), ENDS)
def test_ranks_are_started_again_as_often_as_the_case_says(
    tmp_path: Path, program: str, world_size: int, reason: str
) -> None:
    """A person is told where logs are; requests are not."""
    supervisor, told = fail(tmp_path, program, world_size)
    logs = "; all ranks' logs: /results/x" if "logs" in program else ""
    assert re.fullmatch(reason, supervisor.failed)
    assert supervisor.restarts == 1
    first, last = told
    assert re.fullmatch(f"{reason}{logs}; starting the ranks again \\(1 of 1\\)", first)
    assert last == f"error: {supervisor.failed}{logs}"


def test_a_launcher_s_lines_are_passed_on_except_its_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Lines of any length; a case that is refused is not started again."""
    lines = b"a line\nerror: the \xff cup\n" + b"x" * 10_000 + b"\nrest\n"
    supervisor, told = fail(tmp_path, WRITES.format(lines, EXIT_STATUS))
    assert told == ["error: the \N{REPLACEMENT CHARACTER} cup"]
    assert supervisor.restarts == 0
    shown = capfd.readouterr().err.splitlines()
    assert (shown[0], "".join(shown[1:])) == ("a line", "x" * 10_000 + "rest")


FAULTS = {
    "raise": r"rank 1 \(pid \d+\) failed: exit status 1: in a step",
    "differ": r"rank 1 \(pid \d+\) failed: exit status 1: RuntimeError: rank 1 differs from rank 0 at step \d+: its .*",
    "refuse": "the cup is empty",
    "hang": r"the ranks have not answered for \d+ s",
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_is_told(
    tmp_path: Path, case: str, fault: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAULT", fault)

    async def run() -> None:
        options = ["serve_config.step_timeout_s=2", "serve_config.restarts=9"] if fault == "refuse" else []
        async with served(tmp_path, case, "serve_config.step_timeout_s=2", *options, faulty=True) as supervisor:
            if not supervisor.failed:
                _, why = await answer(supervisor.client, [1, 2, 3], 100)
                assert re.fullmatch(FAULTS[fault], why)
                await until(lambda: bool(supervisor.failed))
            assert re.fullmatch(FAULTS[fault], supervisor.failed)
            assert (await answer(supervisor.client, [1], 1))[1] == supervisor.failed
            assert not supervisor.restarts  # a case that is refused would be refused again

    asyncio.run(run())
    shown = capfd.readouterr()
    assert shown.out.count("error: ") == 1
    if fault == "hang":
        (folder,) = re.findall("the stacks of all ranks are in (.*)", shown.out)
        assert "faulty_schedule" in Path(folder, "stacks1.log").read_text()
        assert "all_reduce" in Path(folder, "stacks0.log").read_text()  # it waits for rank 1


@pytest.mark.parametrize("phase", thorough_but(["load", "idle"], "idle"))
def test_ranks_end_with_their_front(tmp_path: Path, temporary: Path, case: str, phase: str) -> None:
    path = tmp_path / "socket"
    front = subprocess.Popen(
        [sys.executable, "tests/serving/ranks/lonely_front.py", case, str(path), phase],
        cwd=ROOT,
        env=os.environ | {"FAULT": phase},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert front.stdout
    try:
        # A rank's line and its end are two writes, between which the front's line may come.
        assert any(line.endswith("reached\n") for line in front.stdout)
        assert len(processes_of(path)) == 3
    finally:
        front.kill()
        front.wait()
    asyncio.run(until(lambda: not processes_of(path)))
    front.stdout.close()


RANK_DIED = r"rank 1 \(pid \d+\) on node 1 \(.*\) failed: killed by SIGKILL"
NODES = {
    "the server stops": (0, "the server has ended"),
    "a rank dies": (1, rf"error: {RANK_DIED}; logs on each node: .*"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("end", NODES)
def test_two_nodes(tmp_path: Path, temporary: Path, case: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers on this machine stand for two nodes. Requests are answered; however the server ends, both nodes'
    ranks end, and each node says why in one line."""
    common = dict(NNODES="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo")
    second = subprocess.Popen(
        [sys.executable, "-m", "umbra", "serve", case],
        cwd=ROOT,
        env=os.environ | common | {"NODE_RANK": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    for name, value in (common | {"NODE_RANK": "0", "FAULT": "none"}).items():
        monkeypatch.setenv(name, value)

    async def run() -> None:
        async with served(tmp_path, case) as supervisor:
            assert await answer(supervisor.client, [1, 2, 3], 5) == await answer(supervisor.client, [1, 2, 3], 5)
            if end == "a rank dies":
                asked = asyncio.create_task(answer(supervisor.client, LONG, 5))
                await asyncio.sleep(0.1)
                os.kill(rank_below(second.pid), signal.SIGKILL)
                await until(lambda: bool(supervisor.failed))
                assert re.fullmatch(RANK_DIED, supervisor.failed)
                assert await asked == ([], supervisor.failed)

    try:
        asyncio.run(run())
        output = second.communicate(timeout=300)[0]
    finally:
        second.kill()
    status, line = NODES[end]
    said = [text for text in output.splitlines() if text.startswith(("error: ", "the server"))]
    assert len(said) == 1, output
    assert re.fullmatch(line, said[0])
    assert "Traceback" not in output
    assert second.returncode == status


def rank_below(server: int) -> int:
    """The process id of the one rank below `umbra serve` on another node than the first, which starts a launcher."""
    return next(pid for launcher in children(server) for pid in children(launcher) if rank_of(pid) == 1)


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
