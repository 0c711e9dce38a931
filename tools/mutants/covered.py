"""Which tests run which lines: one run of all tests with coverage, file by file."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from files import ROOT
from tools.mutants.forks import Outcome, fresh, run

CONFIG = """[run]
source = {source}
data_file = {data}
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
patch = fork
    _exit
disable_warnings = no-data-collected, module-not-imported, module-not-measured, couldnt-parse
"""


def libraries() -> list[str]:
    """The modules that all tests import."""
    collect = "import sys, pytest; pytest.main(['--collect-only', '-q', '-o', 'addopts=', '-p', 'no:cacheprovider'])"
    printed = subprocess.run(
        [sys.executable, "-c", collect + "; print('\\n'.join(['MODULES', *sys.modules]))"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return printed.split("MODULES\n")[1].split()


def measure(test_file: str, flags: list[str], work: Path, sources: list[str], limit_s: float) -> Outcome:
    """Runs one file of tests; the lines that each test ran are in `work`/coverage."""
    name = test_file.replace("/", ".")
    folder = work / "coverage" / name
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config"
    config.write_text(CONFIG.format(source="\n    ".join(sources), data=folder / "data"))

    import coverage

    @contextlib.contextmanager
    def measured() -> Iterator[Callable[[str], None]]:
        os.environ["COVERAGE_PROCESS_START"] = str(config)  # read by coverage in processes that tests start
        meter = coverage.Coverage(config_file=str(config), messages=False)

        def before(test: str) -> None:
            meter.switch_context(test)
            meter.set_option("run:context", test)  # for forks

        meter.start()
        try:
            yield before
        finally:
            meter.stop()
            meter.save()

    return run(lambda: fresh([test_file, *flags], around=measured), work / f"{name}.log", limit_s)


@dataclass
class Map:
    """The tests that passed, and by file and line which of them run it: bit n stands for test n."""

    tests: list[str]
    seconds: list[float]
    lines: dict[str, dict[int, int]]

    def selected(self, mask: int) -> list[int]:
        return [n for n in range(len(self.tests)) if mask >> n & 1]


def merge(outcomes: dict[str, Outcome], work: Path) -> Map:
    """The map from the coverage of all test files; `outcomes` by test file."""
    import coverage

    seconds = {t: s for o in outcomes.values() for t, s in o.passed.items() if t not in {*o.failed, *o.skipped}}
    tests = sorted(seconds)
    bits = {test: 1 << n for n, test in enumerate(tests)}
    lines: dict[str, dict[int, int]] = {}
    for test_file in outcomes:
        for file in (work / "coverage" / test_file.replace("/", ".")).glob("data*"):
            data = coverage.CoverageData(str(file))
            try:
                data.read()
            except coverage.exceptions.DataError:
                continue  # its process was killed while it wrote
            for path in data.measured_files():
                masks = lines.setdefault(Path(path).relative_to(ROOT).as_posix(), {})
                for line, contexts in data.contexts_by_lineno(path).items():
                    for context in contexts:  # of processes that a test starts: with the test's phase in parentheses
                        masks[line] = masks.get(line, 0) | bits.get(context, bits.get(context.rsplit(" (", 1)[0], 0))
    return Map(tests, [seconds[t] for t in tests], lines)
