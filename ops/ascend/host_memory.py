"""Memory of the host that the NPU copies from and to while the host goes on: pinned when it is allocated, or registered
later."""

import ctypes
import functools
from collections.abc import Iterable

import torch
import torch_npu
from torch import Tensor

from umbra.base.errors import UserError

# Bytes that are registered at once. On A3 copies from ranges below 128 MB reached 110 GB/s, from larger ones much less
# (published: vllm-ascend 8851).
MOST = 127 << 20
PAGE = 4096
TO_DEVICE, ON_DEVICE = 1, 3  # ACL_MEMCPY_HOST_TO_DEVICE, ACL_MEMCPY_DEVICE_TO_DEVICE


def pinned(shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
    """Returns an uninitialised pinned tensor. If CANN has no pinned memory left, it raises a UserError that begins with
    `what`; torch_npu 2.13.0 itself does not raise then, but returns a tensor at address 0."""
    memory = torch.empty(shape, dtype=dtype, pin_memory=True)
    if memory.numel() and not memory.data_ptr():
        raise UserError(f"{what}: no pinned memory on the host for {dtype} {shape}")
    return memory


@functools.cache
def _acl() -> ctypes.CDLL:
    acl = ctypes.CDLL("libascendcl.so")
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    acl.aclrtHostRegister.argtypes = pointer, size, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p)
    acl.aclrtHostUnregister.argtypes = (pointer,)
    acl.aclrtMemcpyAsync.argtypes = pointer, ctypes.c_size_t, pointer, ctypes.c_size_t, ctypes.c_int, pointer
    return acl


class Registered:
    """Memory (rows, bytes) that is registered with the current device until `end`, in slices of whole rows, so that a
    copy of a row reads one range. Rows begin at pages. `what` begins the message of an error."""

    def __init__(self, memory: Tensor, what: str):
        self.memory, self.slices = memory, list[int]()
        count, row = memory.shape
        if memory.data_ptr() % PAGE or row % PAGE:
            raise AssertionError(f"{what}: rows of {row} bytes at {memory.data_ptr():x} do not begin at pages")
        for part in memory.split(max(MOST // row, 1)):
            address, mapped = part.data_ptr(), ctypes.c_void_p()
            if error := _acl().aclrtHostRegister(address, part.numel(), 0, ctypes.byref(mapped)):
                done = len(self.slices)
                self.end()
                raise UserError(
                    f"{what}: CANN registers no more of the host's memory (error {error}, after {done} "
                    f"slices of {count * row >> 20} MB): raise `ulimit -l`, or offload_config.start_layer"
                )
            self.slices.append(address)

    def end(self) -> None:
        """To be called when nothing copies from it any more."""
        for address in self.slices:
            _acl().aclrtHostUnregister(address)
        self.slices.clear()


def send(copies: Iterable[tuple[Tensor, Tensor]], way: int = TO_DEVICE) -> None:
    """Copies (to, from) registered memory to the device, or memory of the device, on the current stream. `copy_` would
    wait for each of the former, since torch_npu 2.13 takes for pinned only what it has allocated, and launch a kernel
    for each of the latter."""
    stream = torch_npu.npu.current_stream().npu_stream  # what was launched before has reached the stream then
    for to, source in copies:
        if to.nbytes != source.nbytes:
            raise RuntimeError(f"{source.nbytes} bytes for {to.nbytes}")
        if error := _acl().aclrtMemcpyAsync(to.data_ptr(), to.nbytes, source.data_ptr(), source.nbytes, way, stream):
            raise RuntimeError(f"aclrtMemcpyAsync: error {error}")
