"""Memory on huge pages: that of weights near the threads that read it, where a file may take its place, and that of
caches."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from umbra.ops.cpu.engine import native

if TYPE_CHECKING:
    from umbra.ops.cpu._native import Buffer, Team

HUGE = 2 << 20
_buffers: "WeakValueDictionary[int, Buffer]" = WeakValueDictionary()  # by address


def allocate(nbytes: int, team: "int | Team | list[Team]") -> "Buffer":
    """Zeroed memory near a team of the engine's pool, by its number, or near a team of another pool, or with pages near
    several teams in turn."""
    buffer = (
        native.Buffer(bytes=nbytes, teams=team) if isinstance(team, list) else native.Buffer(bytes=nbytes, team=team)
    )
    if nbytes:
        _buffers[buffer.address] = buffer
    return buffer


def table(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An embedding's table, (rows, columns)."""
    if device.type == "meta":
        return torch.empty(rows, columns, dtype=dtype, device=device)
    return _tensor((rows, columns), dtype, 0)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor. A large one lies on huge pages, each of them near the thread that first writes to it."""
    if math.prod(shape) * dtype.itemsize < HUGE:
        return torch.zeros(shape, dtype=dtype)
    return _tensor(shape, dtype, native.Team(memory=-1, threads=1, cpus=[]))


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, team: "int | Team") -> Tensor:
    return torch.frombuffer(allocate(math.prod(shape) * dtype.itemsize, team), dtype=dtype).view(shape)


def is_allocated(storage: Tensor) -> bool:
    """Returns whether `storage` is the whole of what one call of `allocate` returned."""
    return storage.data_ptr() in _buffers


def map_file(storage: Tensor, path: Path) -> bool:
    """Puts the file in the place of the memory, read-only and without a copy. Returns False, and changes nothing, if
    the memory must lie on a NUMA node of its own, or if the system would not map most of the file in huge pages:
    kernels that read 4 KB pages are slower."""
    buffer = _buffers[storage.data_ptr()]
    if buffer.local:
        return False
    _checked(buffer.map(path=str(path), bytes=storage.nbytes), path)
    if 2 * _huge_bytes(buffer.address) >= storage.nbytes // HUGE * HUGE:
        return True
    buffer.renew()
    return False


def read_file(storage: Tensor, path: Path) -> None:
    """Reads the file into the memory, on all threads."""
    _checked(_buffers[storage.data_ptr()].read(path=str(path), bytes=storage.nbytes), path)


def clear(storage: Tensor) -> None:
    """Zeroed memory again, whatever a file put there."""
    _buffers[storage.data_ptr()].renew()


def _checked(error: int, path: Path) -> None:
    if error:
        raise OSError(error, os.strerror(error), str(path))


def _huge_bytes(address: int) -> int:
    """The bytes of the file mapped at `address` that are mapped in huge pages."""
    with open("/proc/self/smaps") as file:
        for line in file:
            if line.startswith(f"{address:x}-"):
                for line in file:
                    if line.startswith("FilePmdMapped:"):
                        return int(line.split()[1]) << 10
    return 0
