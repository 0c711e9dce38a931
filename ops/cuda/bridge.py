"""Python bindings of csrc/bridge.cpp, which has the drawing and the ordering argument. Neither torch nor CUDA is needed
to build it."""

import functools
from ctypes import c_uint32, c_uint64
from pathlib import Path

from umbra.ops.bridge import calls
from umbra.ops.bridge.calls import INT, NUMBER, POINTER, TEXT, BridgeJob, HostCalls
from umbra.ops.cuda.driver import LIBRARY

SOURCE = Path(__file__).parent / "csrc" / "bridge.cpp"
BUILT = Path(__file__).parent / "build" / "umbra_bridge.so"
FUNCTIONS = (
    ("bridge_open", POINTER, (TEXT, POINTER, POINTER, NUMBER, NUMBER, INT)),
    ("bridge_bell", c_uint64, (POINTER,)),
    ("bridge_number", c_uint32, (POINTER, POINTER)),
    ("bridge_launch", INT, (POINTER, POINTER, POINTER)),
    ("bridge_ring", INT, (POINTER, POINTER, c_uint32)),
    ("bridge_await", INT, (POINTER, POINTER)),
    ("bridge_write", INT, (POINTER, POINTER, c_uint64, c_uint64)),
    ("bridge_wait", INT, (POINTER, POINTER, INT)),
)
SPIN_US = 2000  # for which a call polls its job: waking a thread takes longer than many a job


def build() -> Path:
    """Compiles the bridge if need be; returns the path of the library."""
    return calls.build(SOURCE, BUILT)


_native = functools.cache(lambda: calls.load(build(), FUNCTIONS))


class GpuBridge(HostCalls):
    """Calls `submit`, a C function int(void *context, Job *) (job.h), from streams: by a doorbell or host functions.
    `submit` and `context` must outlive the bridge. Streams and events are handles of the driver."""

    def __init__(
        self,
        submit: int,
        context: int,
        timeout_s: float,
        doorbell: bool,
        spin_us: int = SPIN_US,
        library: str = LIBRARY,
    ):
        native = _native()
        handle = native.umbra_bridge_open(library.encode(), submit, context, int(timeout_s * 1000), spin_us, doorbell)
        super().__init__(native, handle, "an NVIDIA GPU")
        self.doorbell = doorbell
        self.how = f"experts on the CPU are called by {'a doorbell' if doorbell else 'host functions'}"
        self.numbers: dict[int, int] = {}  # payload -> its number at the doorbell

    def payload(self, job: BridgeJob, sum_bytes: int) -> int:
        payload = super().payload(job, sum_bytes)
        self.numbers[payload] = self.native.umbra_bridge_number(self.handle, payload)
        return payload

    @property
    def bell(self) -> int:
        """The address at which a kernel of the device may ring with the number of a payload; 0: no doorbell."""
        return int(self.native.umbra_bridge_bell(self.handle))

    def launch(self, stream: int, payload: int) -> None:
        """Has the job of the payload computed once the work before it is complete. By host functions the stream
        waits for the job; with a doorbell it goes on until `wait_for_answer`."""
        if self.doorbell:
            self._done(self.native.umbra_bridge_ring(self.handle, stream, self.numbers[payload]))
        else:
            self._done(self.native.umbra_bridge_launch(self.handle, stream, payload))

    def wait_for_answer(self, stream: int) -> None:
        """Makes the stream wait for the job that was launched last, by a doorbell."""
        self._done(self.native.umbra_bridge_await(self.handle, stream))

    def write(self, stream: int, address: int, value: int) -> None:
        """Writes 64 bits of the device's memory once the stream's work before it is complete."""
        self._done(self.native.umbra_bridge_write(self.handle, stream, address, value % (1 << 64)))

    def happened(self, event: int, wait_ms: int) -> bool:
        """Waits at most `wait_ms` for the event; returns whether it has happened."""
        status = self.native.umbra_bridge_wait(self.handle, event, wait_ms)
        if status < 0:
            self._done(status)
        return bool(status == 0)
