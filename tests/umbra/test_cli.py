"""The command line: help that fits a screen, a fast start, and commands that call their functions."""

import re
import subprocess
import sys
from types import ModuleType

import pytest

from tests.command import umbra
from umbra.base.files import ROOT, VERSION
from umbra.cli import benchmarks, make_parser
from umbra.executor.config.case import Case
from umbra.flags import given

COMMANDS = [
    "run",
    "chat",
    "serve",
    "run-batch",
    "pull",
    "init",
    "plan",
    "list",
    "clear-cache",
    "inspect",
    "quantize",
    "evaluate",
]
COMMANDS += ["logits", "bench"]


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


def test_flags_of_other_engines_set_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag is the same as --set of its key, and goes before none of them."""
    cases: list[Case] = []
    module = ModuleType("umbra.chat")
    module.chat = cases.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "umbra.chat", module)
    flags = "-c 500 -np 2 --seed 3 --dtype half --enforce-eager --quantization q4 --temp 0.5 "
    flags += "--speculative-algorithm NGRAM --num-speculative-tokens 4"
    for model in (["demo"], ["-m", "demo"], []):
        done = umbra("chat", *model, *flags.split(), "-t", "1")
        assert (done.returncode, done.stderr) == (0, "")
    assert [case.name for case in cases] == ["demo", "demo", "demo_chat"]
    for case in cases:
        data = case.data_config
        assert (data.input_max_len + data.max_new_tokens, data.batch_size, case.threads) == (500, 2, 1)
        assert (case.sampling_config.seed, case.sampling_config.temperature) == (3, 0.5)
        assert (case.model_config.dtype, case.exe_mode, case.quantization.method) == ("float16", "eager", "q4")
        assert (case.draft_config.method, case.draft_config.tokens) == ("lookup", 4)


def test_a_flag_of_a_list_takes_words_or_json() -> None:
    parser = make_parser()
    for words in (["http://a", "*"], ['["http://a", "*"]']):
        args = parser.parse_args(["serve", "demo", "--allowed-origins", *words])
        assert given(args) == {"serve_config.cors_origins": ["http://a", "*"]}
    assert given(parser.parse_args(["serve", "--alias", "a", "b"])) == {"serve_config.served_model_name": "a b"}


def test_the_version_is_that_of_the_package() -> None:
    assert umbra("--version").stdout == f"umbra {VERSION}\n"
    assert f'\nversion = "{VERSION}"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("serve demo --gpu-memory-utilization 0.9", "--gpu-memory-utilization: memory is counted"),
        ("serve demo --api-key x", "give --api-key-file FILE"),
        ("run demo --batch-size 3", "--set data_config.batch_size=VALUE"),
        ("serve demo --max-model-length 3", "did you mean --max-model-len?"),
        ("serve demo --port abc", "serve_config.port: 'abc' is not an integer"),
        ("serve demo --max-model-len 1", "data_config.max_model_len: 1 must be at least 2"),
        ("run demo --port 3", "--set serve_config.port=VALUE"),
        ("serve demo --revision v1", "--revision: write MODEL@REVISION"),
        ("serve some.gguf", "some.gguf: there is no such file"),
        ("chat demo --model x", "give one of the two"),
        ("plan xyzzy", "no case 'xyzzy', and no folder of that name: give a case"),
    ],
)
def test_what_is_not_accepted_says_what_to_do(command: str, said: str) -> None:
    done = umbra(*command.split())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


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
