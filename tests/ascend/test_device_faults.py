"""Calls to the device fail, one in each run: every run is answered or ends in one line. device_faults.py tries more of
them."""

import subprocess
import sys

import pytest

from umbra.files import ROOT

CASE = ["exe_mode=acl_graph", "offload_config.mode=elastic", "offload_config.arena_mb=1"]


@pytest.mark.thorough
def test_a_call_that_fails_is_one_line() -> None:
    """In a process of its own, from which others can be forked: it has not used the device."""
    command = [sys.executable, "-m", "tests.ascend.device_faults", "--most", "4", *CASE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "refused" in done.stdout
