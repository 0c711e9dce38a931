"""Notices ranks that a signal such as SIGSTOP has halted, for which the others would wait until `comm_timeout_s`."""

import contextlib
import os
import signal
import threading
from collections import Counter

from umbra.executor.launch.processes import children, state

LOOK_S = 1.0
HALTED_S = 30.0  # seconds that a rank may be halted; less than that, somebody may have wanted


class Halts:
    """While this context lasts, a rank that this process has started and that is halted for too long is killed;
    `reasons` then has its process id. The time is counted in looks, so that a halt of this process as well, as by
    Ctrl-Z, is none of its ranks'."""

    def __init__(self, limit_s: float = HALTED_S, look_s: float = LOOK_S):
        self.limit_s, self.look_s = limit_s, look_s
        self.reasons: dict[int, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="halts")

    def __enter__(self) -> "Halts":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        looks: Counter[int] = Counter()
        while not self._ended.wait(self.look_s):
            for pid in children():
                looks[pid] = looks[pid] + 1 if state(pid) == "T" else 0
                if looks[pid] * self.look_s >= self.limit_s:
                    self.reasons[pid] = f"halted by a signal for {self.limit_s:g} s"
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
