"""A sample of the calls that `python -m tests.faults` makes fail, and of the kills of `tests.faults.kills`."""

import subprocess
from pathlib import Path

import pytest

from tests.faults.preload import unsynced, with_faults
from umbra.base.files import ROOT

pytestmark = pytest.mark.slow
SEED = "5"  # of the run in docs/reliability.md; another one fails other calls


@pytest.mark.thorough
@pytest.mark.parametrize("names", [("offline", "kept"), ("rank",)])
def test_calls_that_fail(tmp_path: Path, names: tuple[str, ...]) -> None:
    run(tmp_path, "tests.faults", "--only", *names, "--most", "1", "--seed", SEED)


@pytest.mark.thorough
def test_kills(tmp_path: Path) -> None:
    run(tmp_path, "tests.faults.kills", "--times", "30")


@pytest.mark.thorough
def test_what_a_machine_refuses_for_a_whole_run(tmp_path: Path) -> None:
    """In one process with the library, from which all runs are forked."""
    run(tmp_path, "tests.faults.machine", str(tmp_path / "runs"), home=False)


def run(folder: Path, *module: str, home: bool = True) -> None:
    command, environment = with_faults(["-m", *module], folder)
    if not home:
        del environment["HOME"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_renamed_before_it_is_on_the_disk_is_found() -> None:
    file = "create\t/a/x.tmp\t\nwrite\t/a/x.tmp\t\n{}rename\t/a/x.tmp\t/a/x\n"
    assert unsynced(file.format("")) == ["/a/x.tmp -> /a/x: ['/a/x.tmp']"]
    assert not unsynced(file.format("fsync\t/a/x.tmp\t\n"))
    assert unsynced(file.format("fsync\t/a/x.tmp\t\nwrite\t/a/x.tmp\t\n"))
    folder = "mkdir\t/a/new\t\ncreate\t/a/new/x\t\nwrite\t/a/new/x\t\nfsync\t/a/new/x\t\n{}rename\t/a/new\t/a/old\n"
    assert unsynced(folder.format("")) == ["/a/new -> /a/old: ['/a/new']"]
    assert not unsynced(folder.format("fsync\t/a/new\t\n"))
