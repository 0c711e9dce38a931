"""Python bindings of csrc/bridge.cpp, which has the drawing and the ordering argument. Neither torch nor CANN is needed
to build it."""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

from umbra.base.errors import UserError
from umbra.ops.ascend.cann import HOST_FUNC_SINCE, since

SOURCE = Path(__file__).parent / "csrc" / "bridge.cpp"
JOB = Path(__file__).parents[1] / "cpu" / "csrc" / "shadow" / "job.h"
BUILT = Path(__file__).parent / "build" / "umbra_bridge.so"


class BridgeJob(ctypes.Structure):
    """The job that a worker receives; job.h has the shapes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "places", "sums")),
        *((name, ctypes.c_int64) for name in ("tokens", "top_k", "hidden", "layer", "step")),
        ("done", ctypes.c_void_p),
    )


SUBMIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(BridgeJob))
DONE = ctypes.CFUNCTYPE(None, ctypes.POINTER(BridgeJob), ctypes.c_int)


class BridgeError(RuntimeError):
    """The sums of a layer did not arrive; the text names layer and step. The bridge cannot be used any more."""


def build(out: Path = BUILT) -> Path:
    """Compiles the bridge if its sources are newer, and returns the path of the library. Several ranks may call this at
    the same time."""
    if out.is_file() and out.stat().st_mtime_ns >= max(SOURCE.stat().st_mtime_ns, JOB.stat().st_mtime_ns):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        made = Path(folder) / out.name
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-pthread"]
        if subprocess.run(["g++", *flags, str(SOURCE), "-o", str(made), "-ldl"], check=False).returncode:
            raise UserError(f"{SOURCE.name}: g++ could not compile it, see above")
        os.replace(made, out)
    return out


@functools.cache
def _native() -> ctypes.CDLL:
    native = ctypes.CDLL(str(build()))
    pointer, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    for name, result, arguments in (
        ("bridge_told", text, ()),
        ("bridge_open", pointer, (text, pointer, pointer, number, ctypes.c_int)),
        ("bridge_host_func", ctypes.c_int, (pointer,)),
        ("bridge_subscribe", ctypes.c_int, (pointer, pointer)),
        ("bridge_launch", ctypes.c_int, (pointer, pointer, pointer)),
        ("bridge_begin", None, (pointer, number)),
        ("bridge_synchronize", ctypes.c_int, (pointer, pointer, ctypes.c_int32)),
        ("bridge_events", number, (pointer,)),
        ("bridge_error", text, (pointer, text)),
        ("bridge_close", ctypes.c_int, (pointer, number)),
        ("bridge_free", None, (pointer,)),
        ("payload_new", pointer, (pointer, ctypes.POINTER(BridgeJob), ctypes.c_size_t)),
        ("payload_free", None, (pointer,)),
        ("payload_seen", number, (pointer,)),
    ):
        function = getattr(native, f"umbra_{name}")
        function.restype, function.argtypes = result, arguments
    return native


class Bridge:
    """Calls `submit`, a C function int(void *context, Job *) (job.h), from streams. `submit` and `context` must outlive
    the bridge.

    CANN has two ways of calling the host. CANN's version decides which of them is used; `how` says which.
    """

    def __init__(
        self, submit: int, context: int, timeout_s: float, cann: str | None = None, library: str = "libascendcl.so"
    ):
        native, wished = _native(), since(cann, HOST_FUNC_SINCE)
        self.handle = native.umbra_bridge_open(library.encode(), submit, context, int(timeout_s * 1000), wished)
        if not self.handle:
            raise UserError(f"experts on the CPU need CANN: {native.umbra_bridge_told().decode()}")
        host_func = bool(native.umbra_bridge_host_func(self.handle))
        name = "aclrtLaunchHostFunc" if host_func else "aclrtLaunchCallback and a report thread"
        self.how = f"experts on the CPU are called by {name} (CANN {cann or 'of unknown version'})"
        self.payloads: list[int] = []

    def subscribe(self, stream: int) -> None:
        self._done(_native().umbra_bridge_subscribe(self.handle, stream))

    def payload(self, job: BridgeJob, sum_bytes: int) -> int:
        """Makes a payload for `launch`. It is freed when the bridge is closed; until then the buffers of `job` must
        live."""
        made: int = _native().umbra_payload_new(self.handle, ctypes.byref(job), sum_bytes)
        self.payloads.append(made)
        return made

    def launch(self, stream: int, payload: int) -> None:
        self._done(_native().umbra_bridge_launch(self.handle, stream, payload))

    def begin(self, step: int) -> None:
        _native().umbra_bridge_begin(self.handle, step)

    def idle(self, stream: int, wait_ms: int) -> bool:
        """Waits at most `wait_ms` for the stream; returns whether it is idle."""
        status = _native().umbra_bridge_synchronize(self.handle, stream, wait_ms)
        if status < 0:
            self._done(status)
        return bool(status == 0)

    def events(self) -> int:
        """A count that grows by one when a callback begins and when it ends, so it is odd while one is running."""
        return int(_native().umbra_bridge_events(self.handle))

    def seen(self, payload: int) -> int:
        """The last step whose callback has returned; -1 if none has."""
        return int(_native().umbra_payload_seen(payload))

    def check(self, otherwise: str | None = None) -> None:
        """Raises the first error of the bridge as BridgeError; if there is none, raises `otherwise`, if given."""
        error = _native().umbra_bridge_error(self.handle, otherwise.encode() if otherwise else None)
        if error:
            raise BridgeError(error.decode())

    def close(self, within_s: float) -> bool:
        """Waits at most `within_s` for work in flight. Returns True when everything is freed; False if work is still in
        flight, in which case nothing is freed and the buffers of jobs must not be freed either."""
        if not self.handle:
            return True
        handle, self.handle = self.handle, None
        if _native().umbra_bridge_close(handle, int(within_s * 1000)):
            return False
        for payload in self.payloads:
            _native().umbra_payload_free(payload)
        _native().umbra_bridge_free(handle)
        return True

    def _done(self, status: int) -> None:
        if status:
            raise BridgeError(_native().umbra_bridge_told().decode())
