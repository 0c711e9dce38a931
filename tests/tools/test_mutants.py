"""The tool of the mutation tests, tools/mutants: what it changes, what it leaves alone, and how it tries a change."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from files import ROOT
from tools.mutants import trials
from tools.mutants.covered import Map
from tools.mutants.native import native_mutants
from tools.mutants.operators import Mutant, mutants, mutated

CHANGED = {
    "a < b": ["a < b -> a <= b"],
    "a >= b == c": ["a >= b == c -> a > b == c", "a >= b == c -> a >= b != c"],
    "a is not None": ["a is not None -> a is None"],
    "a + b * c": ["a + b * c -> a - b * c", "b * c -> b // c"],
    "a and not b": ["a and (not b) -> a or not b", "not b -> b"],
    "-a": ["-a -> a"],
    "7": ["7 -> 8"],
    "0.5": ["0.5 -> 1.0"],
    "True": ["True -> False"],
    "f(a, b)": ["f(a, b) -> f(b, a)"],
    "min(a, b)": ["min(a, b) -> max(a, b)"],
    "[x for x in a if x]": ["[x for x in a if x] -> [x for x in a if not x]"],
    "b if a else c": ["b if a else c -> b if not a else c"],
    "'text'": [],
    "f'{a + 1}'": [],
    "f(*a, b)": [],
    "os.kill(a, 9)": [],
}
STATEMENTS = {
    "f()": ["f() -> pass"],
    "a.b = c": ["a.b = c -> pass"],
    "a = c": [],
    "a += c": ["a += c -> pass", "a += c -> a -= c"],
    "raise UserError(f'{a + 1}' + str(b - 1))": ["raise UserError(f'{a + 1}' + str(b - 1)) -> pass"],
    "raise NotImplementedError": [],
    "return": ["return -> pass"],
    "return a": ["return a -> return None"],
    "if a:\n        b = a": ["if a: b = a -> if not a: b = a"],
    "if not a:\n        b = a": ["not a -> a"],
    "a: 'int | None' = c": [],
    "print(a - 1)": ["print(a - 1) -> pass"],
}
UNTOUCHED = '''
from typing import TYPE_CHECKING
Number = int | float
if TYPE_CHECKING:
    Other = 1 < 2
@decorated(1, 2)
class A(B):
    """A docstring."""
    def __repr__(self):
        return str(1 + 2)
if __name__ == "__main__":
    main(1)
'''


def found(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "a.py").write_text(text)
    names = [mutant.name for mutant in mutants(tmp_path / "a.py", tmp_path)]
    assert all(name.startswith("a.py | ") for name in names)
    return [name.split(" | ", 2)[2] for name in names]


@pytest.mark.parametrize("expression", CHANGED)
def test_expressions_are_changed(tmp_path: Path, expression: str) -> None:
    assert found(tmp_path, f"def g(a, b, c):\n    x = {expression}\n") == CHANGED[expression]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_statements_are_changed(tmp_path: Path, statement: str) -> None:
    assert found(tmp_path, f"def g(a, b, c):\n    {statement}\n") == STATEMENTS[statement]


def test_what_no_test_should_fail_for_is_left_alone(tmp_path: Path) -> None:
    assert not found(tmp_path, UNTOUCHED)


def test_each_number_gives_its_own_change() -> None:
    path = ROOT / "files.py"
    original = ast.unparse(ast.parse(path.read_text()))
    trees = [mutated(path, mutant.number) for mutant in mutants(path)]
    texts = [ast.unparse(tree) for tree in trees]
    assert len(texts) > 5
    assert len(set(texts)) == len(texts)
    assert original not in texts
    for tree in trees:
        compile(tree, str(path), "exec")
    with pytest.raises(IndexError, match="has no mutant"):
        mutated(path, len(texts))


def test_defaults_belong_to_the_import_and_bodies_do_not(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "A = 1\n\n\nclass B:\n    c = 2\n\n    def d(self, e=3):\n        return e + (lambda: 4)()\n"
    )
    places = {
        m.old: (m.at_import, m.scope, m.line) for m in mutants(tmp_path / "a.py", tmp_path) if m.operator == "constant"
    }
    assert places == {"1": (True, "", 1), "2": (True, "B", 5), "3": (True, "B.d", 7), "4": (False, "B.d", 8)}


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


UNITS = "executor/config/units.py"


def shift() -> Mutant:
    [mutant, *_] = [m for m in mutants(ROOT / UNITS) if m.operator == "arithmetic"]
    assert mutant.old == "1 << 20"
    return mutant


def test_an_import_gives_the_changed_code() -> None:
    changed = f"from tools.mutants.forks import install; install('{UNITS}:{shift().number}'); "
    for begin, expected in (("", 1 << 20), (changed, 1 >> 20)):
        assert int(python(begin + "from executor.config.units import MB; print(MB)")) == expected


FORKS = """
import json, os, pathlib, sys
from dataclasses import asdict
from tools.mutants.forks import fresh, run, startup_file
folder = pathlib.Path({folder!r})
os.chdir(folder)
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
with startup_file(folder):
    runs = [
        run(lambda: fresh(["test_ends.py"], first=True), folder / "log", 60),
        run(lambda: fresh(["test_hangs.py"]), folder / "log", 2),
        run(lambda: fresh(["test_imports.py"], mutant={mutant!r}), folder / "log", 60),
    ]
print(json.dumps([asdict(outcome) for outcome in runs]))
"""
IMPORTS = """
import subprocess, sys
def test_here():
    sys.path.insert(0, {root!r})
    from executor.config.units import MB
    assert MB == 1 << 20
def test_in_a_process():
    printed = "import site; site.addsitedir({folder!r}); from executor.config.units import MB; print(MB)"
    done = subprocess.run([sys.executable, "-c", printed], cwd={root!r}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1048576\\n", "")
"""


def test_forks_say_what_their_tests_did(tmp_path: Path) -> None:
    for name, text in (("ends", "assert 0"), ("hangs", "while True: pass")):
        text = f"def test_a(): pass\ndef test_b():\n    {text}\ndef test_c(): pass\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "test_imports.py").write_text(IMPORTS.format(root=str(ROOT), folder=str(tmp_path)))
    mutant = f"{UNITS}:{shift().number}"
    ends, hangs, imports = json.loads(python(FORKS.format(folder=str(tmp_path), mutant=mutant)))
    assert ends["status"] == 1
    assert ends["failed"] == ["test_ends.py::test_b"]
    assert list(ends["passed"]) == ["test_ends.py::test_a", "test_ends.py::test_b"]
    assert hangs["status"] is None
    assert imports["failed"] == ["test_imports.py::test_here", "test_imports.py::test_in_a_process"]
    assert "assert ('0\\n', '') ==" in (tmp_path / "log").read_text(), "the process had the mutant and no other trouble"


COLLECTED = """
import json, os, pathlib, sys
from dataclasses import asdict
import pytest
from tools.mutants.forks import FLAGS, Collected, run
folder = pathlib.Path({folder!r})
def work(collected):
    tests = list(collected.items)
    runs = [run(lambda: collected.run_tests(tests, name), folder / "log", 60) for name in {names!r}]
    (folder / "runs").write_text(json.dumps([asdict(outcome) for outcome in runs]))
os.chdir(folder)
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
pytest.main([*FLAGS, "-s", "test_listed.py"], plugins=[Collected(work)])
"""
LISTED = """
from errors import listed
import executor.serving.errors
def test_few(): assert listed(["a", "b"]) == "a, b"
def test_more(): assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
def test_last(): pass
def test_late():
    from executor.parallel.partitions import ParallelSizes
    assert ParallelSizes(world=8, attn_tp=2).attn_dp == 4
def test_super():
    from executor.serving.errors import ApiError
    assert ApiError(400, "why").args == ("why",)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")
def test_a_function_gets_other_code_in_a_fork(tmp_path: Path) -> None:
    (tmp_path / "test_listed.py").write_text(LISTED)
    numbers = {m.new: m.number for m in mutants(ROOT / "errors.py") if m.scope == "listed"}
    names = [f"errors.py:{numbers[new]}" for new in ("more >= 0", "len(names) + limit")]
    late = ROOT / "executor" / "parallel" / "partitions.py"
    names += [f"{m.path}:{m.number}" for m in mutants(late) if m.new == "self.world * self.attn_tp"]
    api = ROOT / "executor" / "serving" / "errors.py"
    names += [
        f"{m.path}:{m.number}"
        for m in mutants(api)
        if m.old == "super().__init__(one_line(message))" and m.new == "pass"
    ]
    python("import sys; sys.path.insert(0, '.')" + COLLECTED.format(folder=str(tmp_path), names=names))
    runs = json.loads((tmp_path / "runs").read_text())
    assert [run["status"] for run in runs] == [0, 1, 1, 1], "two names do not show the boundary"
    assert runs[0]["failed"] == []
    assert runs[1]["failed"] == ["test_listed.py::test_few"]
    assert len(runs[0]["passed"]) == 5
    assert len(runs[1]["passed"]) == 1
    assert runs[2]["failed"] == ["test_listed.py::test_late"], "also where only the test imports the module"
    assert runs[3]["failed"] == ["test_listed.py::test_super"], "also where the only `super()` is removed"


def test_the_most_promising_tests_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = [f"tests/z/test_z.py::test_far[{n}]" for n in range(2)]
    near = [f"tests/a/test_c.py::test_near[{n}]" for n in range(6)]
    tests = [*far, *near, "tests/a/test_c.py::test_not"]
    path = tmp_path / "a" / "b.py"
    known = Map(
        tests, [0.1, 0.2, *(2.0 - n / 10 for n in range(6)), 0.1], {"a/b.py": {2: 0b0_1111_1111, 5: 0b1_0000_0000}}
    )
    path.parent.mkdir()
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    for file, text in (("tests/z/test_z.py", "from a import b"), ("tests/a/test_c.py", "import a.c")):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    path.write_text("def f(a):\n    return a + (\n        1\n    )\nB = 2\n")
    inside, continued, at_import = [
        next(m for m in mutants(path, tmp_path) if m.old == old) for old in ("a + 1", "1", "2")
    ]
    assert [tests[n] for n in trials.tests_of(inside, known)] == [far[0], *near[:1:-1], far[1], *near[1::-1]]
    assert trials.tests_of(continued, known) == trials.tests_of(inside, known), "a line without code is its statement's"
    ordered = [tests[n] for n in trials.tests_of(at_import, known)]
    assert ordered[:2] == far, "those of a file that imports it"
    assert sorted(ordered) == sorted(tests)


NATIVE = """// A comment: a < b, 1 + 2.
#define N 3
template <int M>
void f(const float* x, int n) { // 4
  static_assert(sizeof(float) == 4, "5");
  if (n < M) return;
  for (int i = 0; i < n; i++) g(x + i);
  h(n);
  if (n >= 2 && x) throw Error("6 < 7");
}
"""


def test_native_code_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.cpp"
    path.write_text(NATIVE)
    changes = [(m.line, NATIVE[m.start : m.end], m.new) for m in native_mutants(path, tmp_path)]
    assert changes == [
        (6, "n < M", "!(n < M)"), (6, "<", "<="), (6, "return;", ";"),
        (7, "0", "1"), (7, "<", "<="), (7, "+", "-"),
        (8, "h(n);", ";"),
        (9, "n >= 2 && x", "!(n >= 2 && x)"), (9, ">=", ">"), (9, "2", "3"), (9, "&&", "||"),
    ]  # fmt: skip
    assert native_mutants(path, tmp_path)[1].name == "a.cpp | if (n [<] M) return; -> <="


def test_the_listed_survivors_exist() -> None:
    """A mutant whose code has changed is taken off the list."""
    listed = [line for line in (ROOT / "tools" / "mutants" / "survivors.txt").read_text().splitlines() if " | " in line]
    by_path: dict[str, set[str]] = {}
    for path in {line.split(" | ")[0] for line in listed}:
        made = native_mutants if path.endswith((".cpp", ".h")) else mutants
        by_path[path] = {mutant.name for mutant in made(ROOT / path)}
    assert not [line for line in listed if line not in by_path[line.split(" | ")[0]]]
