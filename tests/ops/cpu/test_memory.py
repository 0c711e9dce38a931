"""Memory on huge pages, files in the place of weights, and memory that is refused."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from umbra.base.errors import refusal
from umbra.base.files import ROOT
from umbra.ops.cpu import engine, memory

SIZE = 300_001  # no whole pages, and less than a huge one, which the system may refuse


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    engine.start(1, "auto")


def mapped(node: int, path: Path) -> tuple[Tensor, Tensor]:
    """(memory near `node`, what the file holds)"""
    engine.start_teams([engine.native.Team(node, 2, [])], "auto")
    data = torch.randint(1, 256, (SIZE,), dtype=torch.uint8)
    path.write_bytes(bytes(data.numpy()))
    return torch.frombuffer(memory.allocate(SIZE + 100, 0), dtype=torch.uint8)[:SIZE], data


@pytest.mark.parametrize("node", [-1, 0])
def test_a_file_takes_the_place_of_memory(tmp_path: Path, node: int) -> None:
    """Mapped, unless the memory belongs on a NUMA node: then it can only be read."""
    storage, data = mapped(node, tmp_path / "data")
    assert memory.is_allocated(storage)
    assert not memory.is_allocated(storage[64:])
    assert memory.map_file(storage, tmp_path / "data") == (node < 0)
    assert torch.equal(storage, data if node < 0 else torch.zeros_like(data))
    memory.clear(storage)
    assert not storage.any()
    memory.read_file(storage, tmp_path / "data")
    assert torch.equal(storage, data)
    storage[0] = 0  # memory again, which may be written
    assert (tmp_path / "data").read_bytes()[0] == data[0] != 0


def test_large_tensors_lie_on_huge_pages() -> None:
    small, large = memory.zeros((3, 5), torch.bfloat16), memory.zeros((2, 3, memory.HUGE), torch.int8)
    assert small.shape == (3, 5)
    assert large.shape == (2, 3, memory.HUGE)
    assert not small.any()
    assert not large.any()
    assert not memory.is_allocated(small)  # a huge page of its own would be waste
    assert memory.is_allocated(large)
    assert large.data_ptr() % memory.HUGE == 0
    large[1, 2, -1] = 5
    assert large.sum() == 5


def test_small_pages_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, _ = mapped(-1, tmp_path / "data")
    monkeypatch.setattr(memory, "HUGE", 1)  # none of the file is in huge pages
    assert not memory.map_file(storage, tmp_path / "data")
    storage[5] = 1


@pytest.mark.parametrize("how", [memory.map_file, memory.read_file])
def test_files_that_are_too_short_or_absent_are_errors(tmp_path: Path, how: object) -> None:
    storage, _ = mapped(-1, tmp_path / "data")
    (tmp_path / "data").write_bytes(b"x" * (SIZE - 1))
    assert callable(how)
    with pytest.raises(OSError, match="data"):
        how(storage, tmp_path / "data")
    with pytest.raises(FileNotFoundError, match="nothing"):
        how(storage, tmp_path / "nothing")
    assert not storage.any()


@pytest.mark.parametrize(
    ("thrown", "status", "said"),
    [
        ("_ZSt17__throw_bad_allocv", 1, f"error: {refusal(MemoryError())}\n"),
        ("_ZSt16__throw_bad_castv", -signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_cast'"),
    ],
)
def test_memory_that_is_refused_where_nothing_can_catch_it_is_one_line(thrown: str, status: int, said: str) -> None:
    """Python's own code, which is C, lets no exception through."""
    program = "import ctypes; from umbra.ops.cpu.engine import module; module.instruction_sets()"
    program += f"; ctypes.CDLL('libstdc++.so.6')['{thrown}']()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(said)
    assert (done.stderr == said) == (status == 1)
