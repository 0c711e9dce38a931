"""Machines that refuse something for the whole of a run: what is kept for the next start is not kept, and the answer is
the usual one; what the run cannot do without is one line. And a wall clock that jumps."""

import subprocess
from pathlib import Path

import pytest

from tests.faults.preload import with_faults
from umbra.files import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_what_a_machine_refuses(tmp_path: Path) -> None:
    """In one process with the library, from which all runs are forked."""
    command, environment = with_faults(["-m", "tests.faults.machine", str(tmp_path / "runs")], tmp_path)
    del environment["HOME"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
