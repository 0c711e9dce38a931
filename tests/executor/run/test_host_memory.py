"""A case that does not fit into this machine's memory, or into that of a cgroup, is refused in one line before any of
it is allocated."""

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.run.host_memory import check_host_memory, memory_limit
from tests.tiny import save_tiny, tiny_case, write_case
from umbra.errors import UserError
from umbra.files import ROOT

MEMORY = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"  # version 1
UNIFIED = Path("/sys/fs/cgroup"), "memory.max"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_of_a_cgroup_and_those_above_it_counts(tmp_path: Path, version: int) -> None:
    name, top = ("memory.max", tmp_path) if version == 2 else ("memory.limit_in_bytes", tmp_path / "memory")
    lines = {2: "0::/a/b\n", 1: "9:name=systemd:/x\n5:cpu,cpuacct:/y\n4:memory:/a/b\n0::/\n"}
    own = write(tmp_path / "own", lines[version])
    assert memory_limit(tmp_path, own)[1] == "this machine's memory"
    write(top / "a" / "b" / name, "max\n" if version == 2 else "9223372036854771712\n")
    write(top / "a" / name, "1000000\n")
    assert memory_limit(tmp_path, own) == (1000000, str(top / "a" / name))
    write(top / "a" / "b" / name, "500000\n")
    assert memory_limit(tmp_path, own) == (500000, str(top / "a" / "b" / name))
    write(top / name, "70000\n")  # all that a container sees, whose cgroup has its name outside
    own.write_text(lines[version].replace("/a/b", "/unknown/outside"))
    assert memory_limit(tmp_path, own) == (70000, str(top / name))


def test_no_cgroups_and_strange_lines(tmp_path: Path) -> None:
    machine = memory_limit(tmp_path, tmp_path / "none")
    assert machine[1] == "this machine's memory"
    assert memory_limit(tmp_path, write(tmp_path / "own", "0::/../../etc\n1:memory:\n")) == machine


def test_a_case_that_does_not_fit_is_refused_with_its_sizes(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    case = tiny_case(tmp_path, tmp_path / "model")
    check_host_memory(case, 1)
    many = 1_000_000
    with pytest.raises(UserError, match=rf"on each of {many} rank\(s\) do not fit into the .* GB of .*: --set qua"):
        check_host_memory(case, many)
    arena = tiny_case(tmp_path, tmp_path / "model", offload_config={"mode": "elastic", "arena_mb": 100})
    with pytest.raises(UserError, match=r"0\.10 GB of KV cache"):  # the arena, which is allocated whole
        check_host_memory(arena, many)


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """A cgroup with this limit. Where none can be made, the test is skipped."""
    top, name = UNIFIED if (UNIFIED[0] / "cgroup.controllers").exists() else MEMORY
    group = top / f"umbra-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(nbytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


@pytest.mark.slow
def test_in_a_cgroup_one_line_comes_before_a_kill(tmp_path: Path) -> None:
    """Weights of 4 GB in a cgroup of 1 GB: without the check, the system kills the process."""
    save_tiny(tmp_path / "model", moe_intermediate_size=64)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"moe_intermediate_size": 64', '"moe_intermediate_size": 700000'))
    case = write_case(tmp_path / "large.yaml", tmp_path / "model", model_config={"with_ckpt": False})
    with limited(1 << 30) as group:
        code = f"""
        import os
        from pathlib import Path
        Path({str(group)!r}, "cgroup.procs").write_text(str(os.getpid()))
        from umbra.errors import run_main
        from executor.config.env import rank_env
        from executor.config.load import load_case
        from executor.model_runner import make_runner
        run_main(lambda argv: make_runner(load_case({str(case)!r}), Path("/nowhere"), rank_env()).setup())
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "do not fit into the 1.00 GB of /sys/fs/cgroup/" in done.stderr
