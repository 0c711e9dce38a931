"""The functions of NVIDIA's driver that Umbra calls itself, where torch offers none. The library is loaded when it is
first needed, so this imports anywhere."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from umbra.base.errors import UserError

LIBRARY = "libcuda.so.1"
NOT_READY, ALREADY_REGISTERED = 600, 712  # CUDA_ERROR_..
DEVICE_MAP, PORTABLE = 2, 1  # CU_MEMHOSTREGISTER_.., CU_MEMHOSTALLOC_..
NON_BLOCKING, NO_TIMING = 1, 2  # CU_STREAM_.., CU_EVENT_DISABLE_TIMING
THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
ATTRIBUTES = {  # CU_DEVICE_ATTRIBUTE_..
    "multiprocessors": 16,
    "can_map_host_memory": 19,
    "l2_bytes": 38,
    "copy_engines": 40,
    "unified_addressing": 41,
    "major": 75,
    "minor": 76,
    "pageable_memory_access": 88,
    "host_pointer_for_registered": 91,
    "host_register": 99,
    "read_only_host_register": 113,
    "wait_value_nor": 123,
    "flush_remote_writes": 98,
    "host_numa_id": 134,
}
P, SIZE, INT, WORD = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (WORD,),
    "cuDriverGetVersion": (P,),
    "cuDeviceGet": (P, INT),
    "cuDeviceGetCount": (P,),
    "cuDeviceGetName": (P, INT, INT),
    "cuDeviceGetAttribute": (P, INT, INT),
    "cuDeviceTotalMem_v2": (P, INT),
    "cuDevicePrimaryCtxRetain": (P, INT),
    "cuCtxSetCurrent": (P,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (P, SIZE),
    "cuMemFree_v2": (P,),
    "cuMemHostAlloc": (P, SIZE, WORD),
    "cuMemFreeHost": (P,),
    "cuMemHostRegister_v2": (P, SIZE, WORD),
    "cuMemHostUnregister": (P,),
    "cuMemcpyAsync": (P, P, SIZE, P),
    "cuMemsetD32Async": (P, WORD, SIZE, P),
    "cuStreamCreate": (P, WORD),
    "cuStreamDestroy_v2": (P,),
    "cuStreamSynchronize": (P,),
    "cuStreamWaitEvent": (P, P, WORD),
    "cuStreamBeginCapture_v2": (P, INT),
    "cuStreamEndCapture": (P, P),
    "cuEventCreate": (P, WORD),
    "cuEventDestroy_v2": (P,),
    "cuEventRecord": (P, P),
    "cuEventQuery": (P,),
    "cuEventSynchronize": (P,),
    "cuEventElapsedTime": (P, P, P),
    "cuGraphInstantiateWithFlags": (P, P, ctypes.c_uint64),
    "cuGraphLaunch": (P, P),
    "cuGraphGetNodes": (P, P, P),
    "cuGraphExecDestroy": (P,),
    "cuGraphDestroy": (P,),
}


class CudaError(RuntimeError):
    """A call of the driver that failed; `code` is its CUresult."""

    def __init__(self, function: str, code: int, name: str):
        super().__init__(f"{function}: error {code} ({name})")
        self.code = code


class Driver:
    """The driver's functions by their names, each of which raises CudaError if it fails."""

    def __init__(self, library: str = LIBRARY):
        try:
            self.library = ctypes.CDLL(library)
        except OSError as error:
            raise UserError(f"no driver of an NVIDIA GPU: {error}") from None
        self.path = library

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.library, name)
        function.argtypes, function.restype = FUNCTIONS[name], INT

        def call(*arguments: Any) -> None:
            if code := function(*arguments):
                raise CudaError(name, code, self.error_name(code))

        setattr(self, name, call)
        return call

    def error_name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or b"unknown").decode()

    def number(self, name: str, *arguments: Any) -> int:
        """The number that a function gives by its first argument."""
        value = ctypes.c_int64()
        getattr(self, name)(ctypes.byref(value), *arguments)
        return value.value

    def open(self, device: int = 0) -> int:
        """Makes the device's primary context, which torch uses too, current in this thread. -> the context"""
        self.cuInit(0)
        context = self.number("cuDevicePrimaryCtxRetain", device)
        self.cuCtxSetCurrent(context)
        return context

    def attributes(self, device: int = 0) -> dict[str, int]:
        return {name: self.number("cuDeviceGetAttribute", code, device) for name, code in ATTRIBUTES.items()}

    def name(self, device: int = 0) -> str:
        text = ctypes.create_string_buffer(256)
        self.cuDeviceGetName(text, 256, device)
        return text.value.decode()

    def stream(self) -> int:
        return self.number("cuStreamCreate", NON_BLOCKING)

    def event(self, timing: bool = False) -> int:
        return self.number("cuEventCreate", 0 if timing else NO_TIMING)

    def allocate(self, nbytes: int) -> int:
        """Memory of the device."""
        return self.number("cuMemAlloc_v2", nbytes)

    def pinned(self, nbytes: int) -> int:
        """Pinned memory of the host, at the same address for the device."""
        return self.number("cuMemHostAlloc", nbytes, PORTABLE | DEVICE_MAP)

    def happened(self, event: int) -> bool:
        try:
            self.cuEventQuery(event)
        except CudaError as error:
            if error.code != NOT_READY:
                raise
            return False
        return True

    def elapsed_ms(self, begin: int, end: int) -> float:
        value = ctypes.c_float()
        self.cuEventElapsedTime(ctypes.byref(value), begin, end)
        return value.value

    @contextmanager
    def captured(self, stream: int) -> Iterator["DriverGraph"]:
        """Captures what the stream, and those that it forks to, are given meanwhile."""
        graph = DriverGraph(self)
        self.cuStreamBeginCapture_v2(stream, THREAD_LOCAL)
        try:
            yield graph
        finally:
            handle = ctypes.c_void_p()
            self.cuStreamEndCapture(stream, ctypes.byref(handle))
        graph.finish(handle)


class DriverGraph:
    def __init__(self, driver: Driver):
        self.driver = driver

    def finish(self, graph: ctypes.c_void_p) -> None:
        driver, count = self.driver, ctypes.c_size_t()
        driver.cuGraphGetNodes(graph, None, ctypes.byref(count))
        self.nodes = count.value
        self.executable = driver.number("cuGraphInstantiateWithFlags", graph, 0)
        driver.cuGraphDestroy(graph)

    def launch(self, stream: int) -> None:
        self.driver.cuGraphLaunch(self.executable, stream)

    def end(self) -> None:
        self.driver.cuGraphExecDestroy(self.executable)
