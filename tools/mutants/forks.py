"""Runs pytest in forks of this process, which has imported the libraries but nothing of Umbra: a run costs what its own
imports and tests cost, and each sees the code as if freshly started."""

import contextlib
import gc
import importlib
import importlib.machinery
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from files import ROOT
from tools.mutants.operators import mutated

OWN = ("errors", "files", "ops", "executor", "models", "cpu_offload", "umbra", "run", "benchmarks", "tests", "conftest")
MEMORY = 6 << 30  # of one process: a mutant may ask for any size
ENVIRONMENT = "UMBRA_MUTANT"  # code that installs the mutant, for processes that a test starts
FLAGS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-o", "faulthandler_timeout=0"]


@dataclass
class Outcome:
    """What the tests of one fork did."""

    status: int | None  # pytest's; None: ended from outside
    seconds: float
    failed: list[str] = field(default_factory=list)
    passed: dict[str, float] = field(default_factory=dict)  # seconds by test, with its fixtures
    skipped: list[str] = field(default_factory=list)


class Watch:
    """A pytest plugin: what each test did, and a call before each."""

    def __init__(self, before: Callable[[str], None] = lambda test: None):
        self.failed: list[str] = []
        self.seconds: dict[str, float] = {}
        self.skipped: list[str] = []
        self.before = before

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self.before(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def outcome(self, status: int) -> Outcome:
        return Outcome(status, 0.0, self.failed, self.seconds, self.skipped)


def import_libraries(names: list[str]) -> None:
    """What the tests import of other projects."""
    for name in names:
        if name.split(".")[0] not in (*OWN, "tools") and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.freeze()  # forks then copy fewer pages


def install(mutant: str) -> None:
    """From now on an import of the mutant's file gives its changed code."""
    path, number = mutant.rsplit(":", 1)
    target = str(ROOT / path)
    code = compile(mutated(ROOT / path, int(number)), target, "exec", dont_inherit=True)
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        return code if self.get_filename(fullname) == target else original(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def run(body: Callable[[], "Outcome"], log: Path, limit_s: float) -> Outcome:
    """What `body` returns in a fork with bounded time and memory, whose output goes to `log`."""
    result = log.with_suffix(".json")
    result.unlink(missing_ok=True)
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _bounded(log, limit_s)
            partial = result.with_suffix(".part")
            partial.write_text(json.dumps(asdict(body())))
            partial.replace(result)
            status = 0
        finally:
            os._exit(status)
    ended = _wait(child, begin + limit_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    seconds = time.monotonic() - begin
    if not result.exists():
        return Outcome(None, seconds)
    return Outcome(**json.loads(result.read_text()) | {"seconds": seconds})


def _wait(child: int, end: float) -> bool:
    pause = 0.005
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(pause)
        pause = min(0.1, pause * 1.3)
    return False


def _bounded(log: Path, limit_s: float) -> None:
    os.setsid()
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def fresh(
    tests: list[str], mutant: str = "", first: bool = False, around: Callable[[], Any] = contextlib.nullcontext
) -> Outcome:
    """To be called in a fork: imports and collects the tests and runs them, `first`: only to the first failure.
    `around` gives a context manager of the whole run, whose value is called before each test."""
    for name in [n for n in sys.modules if n.split(".")[0] in OWN]:
        del sys.modules[name]
    if mutant:
        announce(mutant)
        install(mutant)
    import pytest

    with around() as before:
        watch = Watch(before or (lambda test: None))
        status = pytest.main([*FLAGS, *(["-x"] if first else []), *tests], plugins=[watch])
    return watch.outcome(int(status))


def announce(mutant: str) -> None:
    """Processes that the tests of this fork start import the mutant, by `startup_file`."""
    os.environ[ENVIRONMENT] = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tools.mutants.forks import install
install({mutant!r})
sys.path.pop(0)"""


class Collected:
    """A pytest plugin: once all tests are imported and collected, `work` is called in place of running them, and
    `run_tests` runs some in a fork, with a mutant in the body of a function: the function gets other code."""

    def __init__(self, work: Callable[["Collected"], None]):
        self.work = work
        self.items: dict[str, Any] = {}
        self.functions: dict[str, list[FunctionType]] = {}

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.config = session.config
        gc.unfreeze()
        for found in gc.get_objects():
            if type(found) is FunctionType and found.__code__.co_filename.startswith(str(ROOT)):
                self.functions.setdefault(found.__code__.co_filename, []).append(found)
        gc.freeze()
        self.work(self)
        return True

    def run_tests(self, tests: list[str], mutant: str) -> Outcome:
        """To be called in a fork. Runs the tests up to the first failure."""
        path, number = mutant.rsplit(":", 1)
        target = str(ROOT / path)
        codes = dict(_codes(compile(mutated(ROOT / path, int(number)), target, "exec", dont_inherit=True)))
        changed = [
            (f, codes.get((f.__code__.co_qualname, f.__code__.co_firstlineno))) for f in self.functions.get(target, [])
        ]
        if any(code and code.co_freevars != function.__code__.co_freevars for function, code in changed):
            # No function takes such code, as where its only `super()` is removed.
            return fresh(tests, mutant, first=True)
        announce(mutant)
        install(mutant)  # where only a test's own run imports the module
        for function, code in changed:
            if code:
                function.__code__ = code
        watch = Watch()
        self.config.pluginmanager.register(watch)
        items = [self.items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if watch.failed:
                break
        return watch.outcome(int(bool(watch.failed)))


def _codes(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield (inner.co_qualname, inner.co_firstlineno), inner
            yield from _codes(inner)


@contextlib.contextmanager
def startup_file(site_packages: Path) -> Iterator[None]:
    """Processes that tests start import the mutant too: Python executes this file when it starts."""
    path = site_packages / "umbra_mutants.pth"
    path.write_text(f"import os; {ENVIRONMENT!r} in os.environ and exec(os.environ[{ENVIRONMENT!r}])\n")
    try:
        yield
    finally:
        path.unlink()
