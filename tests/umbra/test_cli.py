"""The command line: help that fits a screen, a fast start, and commands that call their functions."""

import re
import subprocess
import sys
from types import ModuleType

import pytest

from tests.command import umbra
from umbra.cli import benchmarks
from umbra.files import ROOT

COMMANDS = ["run", "chat", "serve", "plan", "list", "clear-cache", "inspect", "quantize", "evaluate", "logits", "bench"]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=lambda command: " ".join(command) or "-")
def test_help_fits_a_screen_and_starts_with_an_example(command: list[str]) -> None:
    shown = umbra(*command, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0].startswith(f"example: umbra {' '.join(command)}")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    if not command:
        assert [line.split()[0] for line in lines if re.match(r"    \S", line)] == COMMANDS


@pytest.mark.parametrize("command", [["list"], ["bench"], ["run", "demmo"]])
def test_light_commands_import_no_torch(command: list[str]) -> None:
    code = f"""
import sys
from umbra.cli import execute
try:
    execute({command!r})
except BaseException:
    pass
sys.exit("torch" in sys.modules or "numpy" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


def test_chat_gets_the_case_and_its_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str]]] = []
    module = ModuleType("umbra.chat")
    module.chat = lambda case_name, overrides: calls.append((case_name, overrides))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "umbra.chat", module)
    for command in (["chat", "demo"], ["chat"]):
        assert umbra(*command, "--set", "threads=1", "seed=3").returncode == 0
    assert calls == [(case, ["threads=1", "seed=3"]) for case in ("demo", "demo_chat")]


def test_bench_lists_what_can_run_and_passes_arguments_on() -> None:
    shown = umbra("bench")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == list(benchmarks())
    assert "cpu" in benchmarks()
    assert "machine" not in benchmarks()  # only others import it
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in shown.stdout.splitlines())
    assert "--seconds" in umbra("bench", "cpu", "decode", "--help").stdout
    wrong = umbra("bench", "elasti")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "no benchmark 'elasti'; nearest: elastic" in wrong.stderr
