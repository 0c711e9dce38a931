"""Python bindings of calls.h, which the bridge of every device includes, and how such a bridge is compiled: by g++ when
it is first used, without a device's libraries."""

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from umbra.base.errors import UserError

HERE = Path(__file__).parent
SHARED = HERE / "calls.h", HERE.parent / "cpu" / "csrc" / "shadow" / "job.h"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-pthread")
SLICES = 8  # the host divides its wait into this many parts, and checks the calls after each


class BridgeJob(ctypes.Structure):
    """The job that a worker receives; job.h has the shapes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "places", "sums")),
        *((name, ctypes.c_int64) for name in ("tokens", "top_k", "hidden", "layer", "step")),
        ("done", ctypes.c_void_p),
    )


SUBMIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(BridgeJob))
DONE = ctypes.CFUNCTYPE(None, ctypes.POINTER(BridgeJob), ctypes.c_int)
POINTER, NUMBER, TEXT, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int
COMMON = (
    ("bridge_told", TEXT, ()),
    ("bridge_begin", None, (POINTER, NUMBER)),
    ("bridge_events", NUMBER, (POINTER,)),
    ("bridge_error", TEXT, (POINTER, TEXT)),
    ("bridge_close", INT, (POINTER, NUMBER)),
    ("bridge_free", None, (POINTER,)),
    ("payload_new", POINTER, (POINTER, ctypes.POINTER(BridgeJob), ctypes.c_size_t)),
    ("payload_free", None, (POINTER,)),
    ("payload_seen", NUMBER, (POINTER,)),
)


class BridgeError(RuntimeError):
    """The sums of a layer did not arrive; the text names layer and step. The bridge cannot be used any more."""


def build(source: Path, out: Path, flags: tuple[str, ...] = FLAGS) -> Path:
    """Compiles a bridge if its sources are newer, and returns the path of the library. Several ranks may call this at
    the same time."""
    if out.is_file() and out.stat().st_mtime_ns >= max(file.stat().st_mtime_ns for file in (source, *SHARED)):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        built = Path(folder) / out.name
        if subprocess.run(["g++", *flags, str(source), "-o", str(built), "-ldl"], check=False).returncode:
            raise UserError(f"{source.name}: g++ could not compile it, see above")
        os.replace(built, out)
    return out


def load(library: Path, own: tuple[tuple[str, Any, tuple[Any, ...]], ...]) -> ctypes.CDLL:
    """The library of a bridge with the types of its functions: those that all bridges have, and `own`, as (name without
    `umbra_`, result, arguments)."""
    native = ctypes.CDLL(str(library))
    for name, result, arguments in (*COMMON, *own):
        function = getattr(native, f"umbra_{name}")
        function.restype, function.argtypes = result, arguments
    return native


class HostCalls:
    """The part that the bridges of all devices share. `native` is the library, `handle` the bridge that it opened."""

    def __init__(self, native: ctypes.CDLL, handle: int | None, needs: str):
        """Raises a UserError that begins with `needs` if the bridge could not be opened."""
        self.native, self.handle, self.payloads = native, handle, list[int]()
        if not handle:
            raise UserError(f"experts on the CPU need {needs}: {native.umbra_bridge_told().decode()}")

    def payload(self, job: BridgeJob, sum_bytes: int) -> int:
        """Makes a payload for `launch`. It is freed when the bridge is closed; until then the buffers of `job` must
        live."""
        payload: int = self.native.umbra_payload_new(self.handle, ctypes.byref(job), sum_bytes)
        self.payloads.append(payload)
        return payload

    def begin(self, step: int) -> None:
        self.native.umbra_bridge_begin(self.handle, step)

    def events(self) -> int:
        """A count that grows by one when a call begins and when it ends, so it is odd while one is running."""
        return int(self.native.umbra_bridge_events(self.handle))

    def seen(self, payload: int) -> int:
        """The last step whose call has returned; -1 if none has."""
        return int(self.native.umbra_payload_seen(payload))

    def wait(
        self, ended: Callable[[int], bool], missing: Callable[[], str | None], step: int, timeout_s: float
    ) -> None:
        """Returns when the step has ended, for which `ended` waits at most so many milliseconds. Raises BridgeError,
        which begins with what is `missing`, if no call begins or ends within timeout_s, or if `ended` raises one."""
        slice_ms = max(1, int(timeout_s * 1000 / SLICES))
        events, since = self.events(), time.monotonic()
        while not self._has(ended, slice_ms, missing, step):
            if self.events() != events:
                events, since = self.events(), time.monotonic()
            # A running call detects that its worker takes too long, unless `submit` itself does not return.
            limit = timeout_s * (2 if events % 2 else 1)
            if time.monotonic() - since >= limit and (late := missing()):
                self.check(f"{late} within {limit} s")
        self.check()

    @staticmethod
    def _has(ended: Callable[[int], bool], wait_ms: int, missing: Callable[[], str | None], step: int) -> bool:
        try:
            return ended(wait_ms)
        except BridgeError as error:
            raise BridgeError(f"{missing() or f'step {step}'}: {error}") from None

    def check(self, otherwise: str | None = None) -> None:
        """Raises the first error of the bridge as BridgeError; if there is none, raises `otherwise`, if given."""
        error = self.native.umbra_bridge_error(self.handle, otherwise.encode() if otherwise else None)
        if error:
            raise BridgeError(error.decode())

    def close(self, within_s: float) -> bool:
        """Waits at most `within_s` for work in flight. Returns True when everything is freed; False if work is still in
        flight, in which case nothing is freed and the buffers of jobs must not be freed either."""
        if not self.handle:
            return True
        handle, self.handle = self.handle, None
        if self.native.umbra_bridge_close(handle, int(within_s * 1000)):
            return False
        for payload in self.payloads:
            self.native.umbra_payload_free(payload)
        self.native.umbra_bridge_free(handle)
        return True

    def _done(self, status: int) -> None:
        if status:
            raise BridgeError(self.native.umbra_bridge_told().decode())
