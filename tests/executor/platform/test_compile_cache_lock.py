"""Processes that need the same compiled graph take turns, and none waits for ever."""

import subprocess
import sys
from pathlib import Path

import pytest

from executor.platform.ascend.compile_cache import clear_cache
from tests.executor.platform.test_compile_cache import SHAPES, cache, compile_once, home
from umbra.errors import UserError
from umbra.files import ROOT

OTHER = """
import sys
from pathlib import Path
from tests.executor.platform.test_compile_cache import SHAPES, cache
with cache(Path(sys.argv[1]), patience_s=60).open(4, SHAPES) as entry:
    print("opened", entry.reason or "hit", flush=True)
    if not entry.hit:
        input()
        (entry.folder / "compiled_module").write_bytes(b"x")
    entry.seal()
"""


def start_other(root: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", OTHER, str(root)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def lines_until(process: "subprocess.Popen[str]", start: str) -> str:
    assert process.stdout
    return next(line for line in process.stdout if line.startswith(start)).strip()


def test_two_processes_take_turns(tmp_path: Path) -> None:
    """The second waits while the first compiles, and then uses what the first has sealed."""
    with start_other(tmp_path) as first:
        assert lines_until(first, "opened") == "opened no cache yet"
        with start_other(tmp_path) as second:
            lines_until(second, "compile cache: waiting for another process")
            assert first.stdin
            first.stdin.write("go on\n")
            first.stdin.flush()
            assert lines_until(second, "opened") == "opened hit"
    assert (first.returncode, second.returncode) == (0, 0)


def test_waiting_ends_with_an_error_and_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    with start_other(tmp_path) as first:
        lines_until(first, "opened")
        with pytest.raises(UserError, match=r"tokens4\.lock is held by another run of this case: wait for its end"):
            cache(tmp_path, patience_s=0.1).open(4, SHAPES)
        with pytest.raises(UserError, match="is held by another run"):
            clear_cache("some", tmp_path / "cache")
        cache(tmp_path, rank=1, patience_s=0).open(4, SHAPES).close()  # the entry of another rank is free
        first.kill()
    assert compile_once(tmp_path) == "the last compile was interrupted"


def test_a_lock_is_its_owners_alone(tmp_path: Path) -> None:
    with cache(tmp_path).open(4, SHAPES):
        (lock,) = (tmp_path / "cache").rglob("*.lock")
        assert lock.stat().st_mode & 0o777 == 0o600


def test_a_refusal_gives_the_lock_back(tmp_path: Path) -> None:
    compile_once(tmp_path)
    (home(tmp_path) / "graph/graph.om").write_bytes(b"yy")
    for _ in range(2):
        with pytest.raises(UserError, match="has changed"):
            cache(tmp_path, patience_s=0).open(4, SHAPES)
