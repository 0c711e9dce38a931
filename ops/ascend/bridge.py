"""Python bindings of csrc/bridge.cpp, which has the drawing and the ordering argument. Neither torch nor CANN is needed
to build it."""

import functools
from pathlib import Path

from umbra.ops.ascend.cann import HOST_FUNC_SINCE, since
from umbra.ops.bridge import calls
from umbra.ops.bridge.calls import INT, NUMBER, POINTER, TEXT, HostCalls

SOURCE = Path(__file__).parent / "csrc" / "bridge.cpp"
BUILT = Path(__file__).parent / "build" / "umbra_bridge.so"
FUNCTIONS = (
    ("bridge_open", POINTER, (TEXT, POINTER, POINTER, NUMBER, INT)),
    ("bridge_host_func", INT, (POINTER,)),
    ("bridge_subscribe", INT, (POINTER, POINTER)),
    ("bridge_launch", INT, (POINTER, POINTER, POINTER)),
    ("bridge_synchronize", INT, (POINTER, POINTER, INT)),
)


def build() -> Path:
    """Compiles the bridge if need be; returns the path of the library."""
    return calls.build(SOURCE, BUILT)


_native = functools.cache(lambda: calls.load(build(), FUNCTIONS))


class Bridge(HostCalls):
    """Calls `submit`, a C function int(void *context, Job *) (job.h), from streams. `submit` and `context` must outlive
    the bridge.

    CANN has two ways of calling the host. CANN's version decides which of them is used; `how` says which.
    """

    def __init__(
        self, submit: int, context: int, timeout_s: float, cann: str | None = None, library: str = "libascendcl.so"
    ):
        native, wished = _native(), since(cann, HOST_FUNC_SINCE)
        handle = native.umbra_bridge_open(library.encode(), submit, context, int(timeout_s * 1000), wished)
        super().__init__(native, handle, "CANN")
        host_func = bool(native.umbra_bridge_host_func(handle))
        name = "aclrtLaunchHostFunc" if host_func else "aclrtLaunchCallback and a report thread"
        self.how = f"experts on the CPU are called by {name} (CANN {cann or 'of unknown version'})"

    def subscribe(self, stream: int) -> None:
        self._done(self.native.umbra_bridge_subscribe(self.handle, stream))

    def launch(self, stream: int, payload: int) -> None:
        self._done(self.native.umbra_bridge_launch(self.handle, stream, payload))

    def idle(self, stream: int, wait_ms: int) -> bool:
        """Waits at most `wait_ms` for the stream; returns whether it is idle."""
        status = self.native.umbra_bridge_synchronize(self.handle, stream, wait_ms)
        if status < 0:
            self._done(status)
        return bool(status == 0)
