"""tools/npu_check without a device: processes that hang, die or leave others behind, what is remembered between runs,
and the report. Shell scripts stand in for the processes of stages."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.tools.npu_check import processes, report, session
from umbra.tools.npu_check.__main__ import check, chosen, parser
from umbra.tools.npu_check.numbers import Differs, fused_values
from umbra.tools.npu_check.outcome import FAIL, PASS, SKIPPED, Outcome
from umbra.tools.npu_check.stage import STAGES, Stage

STAGE = Stage(3, "operators", "", ("versions/device",), 2.0)
Scripts = Callable[..., list[str]]


def begin(case: str) -> str:
    return f"echo '{json.dumps({'begin': case})}' >>$EVENTS;"


def end(case: str, result: str = PASS, text: str = "", stage: str = "operators") -> str:
    return f"echo '{json.dumps({'end': Outcome(stage, case, result, text=text).to_json()})}' >>$EVENTS;"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    """Gives scripts to the processes that follow, in turn; `pass` is a stage with one case that passes. Returns the
    stages that were started."""
    left: list[str] = []
    started: list[str] = []

    def start(arguments: list[str], environment: dict[str, str], log: Path, group: bool) -> processes.Process:
        _, name, _, events = arguments
        started.append(name)
        script = left.pop(0) if left else "pass"
        if script == "pass":
            script = begin("a") + end("a", stage=name)
        with open(log, "ab") as out:
            return subprocess.Popen(
                ["bash", "-c", script],
                env=os.environ | {"EVENTS": events},
                stdout=out,
                stderr=out,
                start_new_session=group,
            )

    monkeypatch.setattr(processes, "start", start)

    def give(*given: str) -> list[str]:
        left[:] = given
        return started

    return give


def wait_for_end(pid: int) -> None:
    """A process without a parent that waits for it stays as a zombie."""
    status = Path(f"/proc/{pid}/stat")
    while status.exists() and status.read_text().split()[2] != "Z":
        time.sleep(0.01)


def run(tmp_path: Path, known: tuple[Outcome, ...] = ()) -> list[tuple[str, str]]:
    return [(o.case, o.result) for o in session.run_stage(STAGE, known, tmp_path)]


def test_a_hang_is_cut_off_with_all_its_processes(tmp_path: Path, scripts: Scripts) -> None:
    """The case that hung fails, and the cases after it run in another process."""
    scripts(begin("a") + end("a") + begin("b") + f"sleep 60 & echo $! >{tmp_path}/pid; wait", begin("c") + end("c"))
    (passed, cut, after) = session.run_stage(STAGE, (), tmp_path)
    assert [(o.case, o.result) for o in (passed, cut, after)] == [("a", PASS), ("b", FAIL), ("c", PASS)]
    assert cut.text == "did not end within 2 s"
    assert "cut off" in cut.hint
    wait_for_end(int((tmp_path / "pid").read_text()))


def test_a_stage_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    stage = (
        "import os; from tools.npu_check.worker import end_with_parent; "
        f"open({str(told)!r}, 'w').write(str(os.getpid())); end_with_parent(os.getppid())"
    )
    started = f"subprocess.Popen([sys.executable, '-c', {stage!r}], start_new_session=True)"
    program = f"import subprocess, sys, time; {started}; time.sleep(600)"
    run = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not (told.is_file() and told.read_text()):
        time.sleep(0.01)
    run.kill()
    run.wait()
    wait_for_end(int(told.read_text()))


def test_a_process_that_dies_fails_its_case(tmp_path: Path, scripts: Scripts) -> None:
    scripts(begin("a") + "echo EI0006 sockets; kill -9 $$", begin("b") + end("b"))
    died, after = session.run_stage(STAGE, (), tmp_path)
    assert (died.case, died.result, after.result) == ("a", FAIL, PASS)
    assert died.text == "the process was killed by SIGKILL: EI0006 sockets"
    assert "HCCL_SOCKET_IFNAME" in died.hint


@pytest.mark.parametrize("result", [FAIL, SKIPPED])
def test_a_stage_waits_for_what_it_needs(tmp_path: Path, scripts: Scripts, result: str) -> None:
    started = scripts()
    (skipped,) = session.run_stage(STAGE, (Outcome("versions", "device", result),), tmp_path)
    assert (skipped.result, skipped.text, started) == (SKIPPED, "needs stage 1, device", [])
    assert run(tmp_path, (Outcome("versions", "versions", FAIL),)) == [("a", PASS)]  # of no use to this stage


@pytest.fixture
def known_facts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    now = {"commit": "abc", "cann": "9.1.0"}
    monkeypatch.setattr("umbra.tools.npu_check.__main__.facts", lambda: dict(now))
    return now


def test_a_run_goes_on_where_another_stopped(tmp_path: Path, scripts: Scripts, known_facts: dict[str, str]) -> None:
    """Stages that passed are remembered. Those that failed or were not reached run again, and after a change all do."""
    path, names = tmp_path / "report.md", [stage.name for stage in STAGES]
    started = scripts("pass", "pass", begin("x") + end("x", FAIL, "161002"))
    assert check(None, path) == 1
    assert started == names
    assert "- operators, x: 161002" in path.read_text()
    started.clear()
    assert check(None, path) == 0
    assert started == ["operators"]
    started.clear()
    assert check(chosen(None, "9"), path) == 0
    assert started == ["shadows"]
    started.clear()
    assert check(chosen("model", None), path) == 0
    assert started == ["model"]
    known_facts["cann"] = "9.2.0"
    started.clear()
    assert check(None, path) == 0
    assert started == names


def outcomes() -> list[Outcome]:
    kernels = [dict(custom_us=us, custom_gbps=20e3 * n / us, limit_gbps=1200 + n) for n, us in ((1, 36.0), (2, 56.0))]
    collectives = [dict(way="all-reduce of 2 ranks", bytes=n, us=10 + n / 2e4) for n in (1 << 10, 1 << 20, 1 << 24)]
    return [
        Outcome("versions", "device", PASS, 1.0, "8 of Ascend910_9391"),
        Outcome("kernels", "times", PASS, 2.0, "", measured={"kernel_rows": kernels}),
        Outcome("graphs", "copies", PASS, 0.1, "", measured={"copies": {"h2d_gbps": 24.0, "d2h_gbps": 23.0}}),
        Outcome("graphs", "launches", PASS, 0.1, "", measured={"launches": {"eager_us": 9.0, "graph_us": 3.5}}),
        Outcome("collectives", "2 ranks", PASS, 0.1, "", measured={"collectives": collectives}),
        Outcome("bridge", "eager", FAIL, 0.1, "its callback | has not come", "hint: look"),
    ]


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "secret-host")
    failed = Outcome("collectives", "3 ranks", FAIL, text="no route to secret-host")
    text = report.render({"commit": "abc"}, [*outcomes(), failed], fake=False)
    assert "no route to HOST" in text
    assert "5 passed, 2 failed, 0 skipped." in text
    assert "Not run: builds, operators, overlap, shadows, model." in text
    assert "| bridge | eager | FAIL | 0.1 | its callback \\| has not come |" in text
    assert "- bridge, eager: its callback | has not come. Hint: hint: look" in text
    assert "| pinned copies to the device | 20 | 24 | GB/s |" in text
    assert json.loads(text.split("```")[1].removeprefix("json"))["graphs/launches"]["launches"]["graph_us"] == 3.5
    assert report.FAKE not in text
    assert report.FAKE in report.render({}, [], fake=True)


def test_a_report_names_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "secret-host")
    monkeypatch.setenv("HOME", "/home/somebody")
    text = report.scrubbed("at secret-host: /home/somebody/x, 10.1.2.3:60000 in 192.168.0.7, CANN 9.1.0")
    assert text == "at HOST: ~/x, ADDRESS:60000 in ADDRESS, CANN 9.1.0"


def test_arguments() -> None:
    assert [stage.name for stage in chosen("shadows", None) or []] == ["shadows", "model"]
    assert chosen(None, None) is None
    with pytest.raises(UserError, match="no stage 'x': choose a number or a name of versions"):
        chosen(None, "x")
    text = parser().format_help()
    assert all(f"{stage.number} {stage.name}" in text for stage in STAGES)
    assert "--stage" not in text


def test_bits_may_differ_by_what_a_fused_product_changes_and_no_more() -> None:
    twin = torch.tensor([-1.0, 0.0, 1.0, 3.5, float("nan")]).to(torch.bfloat16)
    assert fused_values("y", twin, twin.clone()) == 0
    near = twin.clone()
    near.view(torch.int16)[[0, 2]] += 1  # the neighbours away from zero
    assert fused_values("y", near, twin) == 2
    near.view(torch.int16)[1] = -32767  # the least negative value
    with pytest.raises(Differs, match="3 values differ"):
        fused_values("y", near, twin)
    far = twin.clone()
    far.view(torch.int16)[3] += 2
    with pytest.raises(Differs, match="1 values differ from the twin's, by up to 2 units"):
        fused_values("y", far, twin)
