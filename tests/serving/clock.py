"""A clock that stands still until a test moves it."""

from types import ModuleType, SimpleNamespace

import pytest


class Clock:
    """The time of `module` from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType):
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.read, perf_counter=self.read))

    def read(self) -> float:
        return self.now
