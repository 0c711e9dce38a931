"""The guard around compiled graphs: what is used, what is made anew, what is refused; torchair is played by a file."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errors import UserError
from executor.cases import ROOT, load_case, load_model_config
from executor.compile_cache import LIMIT, CompileCache, Entry, clear_cache, compile_facts, first_difference
from executor.own_files import source_digest
from executor.versions import Versions

FACTS = {"torch": "2.13.0", "torch_npu": "2.13.0", "case": {"data_config": {"batch_size": 4}, "sizes": (1, 2)}}
SHAPES = [[[4], "int64"]]


def cache(root: Path, facts: dict[str, Any] = FACTS, **options: Any) -> CompileCache:
    return CompileCache("some", options.pop("rank", 0), options.pop("world_size", 2), facts, root / "cache", **options)


def compile_once(root: Path, facts: dict[str, Any] = FACTS, tokens: int = 4) -> str:
    """Open, compile if need be, seal, close; returns the reason, empty for a hit."""
    with cache(root, facts).open(tokens, SHAPES) as entry:
        if not entry.hit:
            (entry.folder / "Model_ab12").mkdir()
            (entry.folder / "Model_ab12" / "compiled_module").write_bytes(b"x" * 1000)
            (entry.folder / "graph.om").write_bytes(b"y")
        entry.seal()
    return entry.reason


def home(root: Path) -> Path:
    return root / "cache" / "some" / "rank0of2" / "tokens4"


def refused(root: Path, why: str) -> None:
    before = sorted(root.rglob("*"))
    with pytest.raises(UserError) as raised:
        compile_once(root)
    assert why in str(raised.value)
    assert "remove it by hand or, if this project did, with --clear-cache" in str(raised.value)
    assert sorted(root.rglob("*")) == before  # nothing was touched


def test_the_second_start_hits_and_each_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_once(tmp_path) == "no cache yet"
    assert capsys.readouterr().out == f"compile cache: miss (no cache yet), compiling into {home(tmp_path)}\n"
    assert compile_once(tmp_path) == ""
    assert capsys.readouterr().out == f"compile cache: hit {home(tmp_path)}\n"
    assert compile_once(tmp_path, tokens=8) == "no cache yet"  # another graph, another folder


def test_where_it_lies_and_what_the_manifest_holds(tmp_path: Path) -> None:
    compile_once(tmp_path)
    assert {p.name for p in home(tmp_path).iterdir()} == {"manifest.json", "graph"}
    kept = json.loads((home(tmp_path) / "manifest.json").read_text())
    assert kept["facts"].items() >= {"torch_npu": "2.13.0", "rank": 0, "world_size": 2, "shapes": SHAPES}.items()
    assert {name: size for name, (size, _) in kept["files"].items()} == {
        "graph.om": 1,
        "Model_ab12/compiled_module": 1000,
    }
    assert {p.stat().st_mode & 0o077 for p in [home(tmp_path), *home(tmp_path).parents][:3]} == {0}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"torch_npu": "2.8.0"}, 'torch_npu was "2.13.0", is "2.8.0"'),
        ({"torch": None, "torch_npu": "2.8.0"}, 'torch was "2.13.0", is null'),
        ({"case": {"data_config": {"batch_size": 8}, "sizes": (1, 2)}}, "case.data_config.batch_size was 4, is 8"),
        ({"case": {"data_config": {"batch_size": 4}, "sizes": (1, 3)}}, "case.sizes was [1, 2], is [1, 3]"),
        ({"sources": "f00"}, "sources is new"),
        ({"layout": 2}, "layout was 1, is 2"),
    ],
)
def test_a_changed_fact_compiles_anew_and_is_named(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    compile_once(tmp_path)
    (home(tmp_path) / "graph" / "graph.om").write_bytes(b"z")  # goes unread: the facts differ already
    assert compile_once(tmp_path, FACTS | changed) == reason
    assert compile_once(tmp_path, FACTS | changed) == ""
    assert (home(tmp_path) / "graph" / "graph.om").read_bytes() == b"y"  # nothing of the old is left


def test_other_shapes_compile_anew(tmp_path: Path) -> None:
    compile_once(tmp_path)
    with cache(tmp_path).open(4, [[[4], "int32"]]) as entry:
        assert entry.reason == 'shapes was [[[4], "int64"]], is [[[4], "int32"]]'


def test_a_fact_that_is_gone_is_named_and_long_values_are_cut() -> None:
    assert first_difference({"a": 1, "b": 1}, {"a": 1}) == "b is gone"
    assert first_difference({"a": {}}, {"a": [1]}) == "a was {}, is [1]"
    assert len(first_difference({"a": "x" * 999}, {"a": "y" * 999})) < 120
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 1}}) == ""


@pytest.mark.parametrize("graph", [True, False])
def test_an_interrupted_compile_starts_again(tmp_path: Path, graph: bool) -> None:
    entry = cache(tmp_path).open(4, SHAPES)
    (entry.folder / "half").write_bytes(b"x")
    entry.close()
    if not graph:
        (entry.folder / "half").unlink()
        entry.folder.rmdir()
    assert compile_once(tmp_path) == "the last compile was interrupted"
    assert compile_once(tmp_path) == ""
    assert not (entry.folder / "half").exists()


def test_an_empty_folder_is_no_cache_yet(tmp_path: Path) -> None:
    home(tmp_path).mkdir(parents=True, mode=0o700)
    assert compile_once(tmp_path) == "no cache yet"


def test_torchair_that_keeps_nothing_is_told_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cache(tmp_path).open(4, SHAPES) as entry:
        entry.seal()
    assert "not kept" in capsys.readouterr().out
    assert compile_once(tmp_path) == "the last compile was interrupted"


def test_a_generous_umask_is_no_reason_to_refuse_our_own(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        compile_once(tmp_path)
    finally:
        os.umask(before)
    assert compile_once(tmp_path) == ""


def damage_size(graph: Path) -> None:
    (graph / "graph.om").write_bytes(b"yy")


def damage_bytes(graph: Path) -> None:
    (graph / "Model_ab12" / "compiled_module").write_bytes(b"x" * 999 + b"!")


def lose(graph: Path) -> None:
    (graph / "graph.om").unlink()


def add(graph: Path) -> None:
    (graph / "Model_ab12" / "other").write_bytes(b"")


def add_above(graph: Path) -> None:
    (graph.parent / "notes.txt").write_text("mine")


def link(graph: Path) -> None:
    (graph / "graph.om").rename(graph.parent.parent / "elsewhere")
    (graph / "graph.om").symlink_to(graph.parent.parent / "elsewhere")


def link_folder(graph: Path) -> None:
    graph.parent.rename(graph.parent.with_name("moved"))
    graph.parent.symlink_to("moved")


def link_graph(graph: Path) -> None:
    graph.rename(graph.parent.with_name("moved"))
    graph.symlink_to("../moved")


def link_manifest(graph: Path) -> None:
    (graph.parent / "manifest.json").rename(graph.parent.parent / "elsewhere")
    (graph.parent / "manifest.json").symlink_to(graph.parent.parent / "elsewhere")


def lose_manifest(graph: Path) -> None:
    (graph.parent / "manifest.json").unlink()


def cut_manifest(graph: Path) -> None:
    os.truncate(graph.parent / "manifest.json", 50)


def swell_manifest(graph: Path) -> None:
    os.truncate(graph.parent / "manifest.json", LIMIT + 1)


def nest_manifest(graph: Path) -> None:
    (graph.parent / "manifest.json").write_text("[" * 100_000)


def foreign_manifest(graph: Path) -> None:
    (graph.parent / "manifest.json").write_text('{"facts": {}, "files": {}}')


def pipe(graph: Path) -> None:
    os.mkfifo(graph / "pipe")


def open_to(name: str, mode: int) -> Callable[[Path], None]:
    def change(graph: Path) -> None:
        (graph / name).resolve().chmod(mode)

    return change


@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (damage_size, "graph.om has changed since it was written"),
        (damage_bytes, "compiled_module has changed since it was written"),
        (lose, "graph.om is missing"),
        (add, "Model_ab12/other is unknown"),
        (add_above, "it holds notes.txt, which is not ours"),
        (link, "graph.om is a symbolic link"),
        (link_folder, "tokens4 is a symbolic link"),
        (link_graph, "graph is a symbolic link"),
        (link_manifest, "manifest.json is unreadable"),
        (lose_manifest, "it holds graph, but no manifest.json"),
        (cut_manifest, "manifest.json is unreadable"),
        (swell_manifest, f"manifest.json has {LIMIT + 1} bytes, more than {LIMIT}"),
        (nest_manifest, "manifest.json is unreadable"),
        (foreign_manifest, "manifest.json is not one of ours"),
        (pipe, "pipe is neither a file nor a folder"),
        (open_to("graph.om", 0o620), "graph.om can be written by others (mode 620)"),
        (open_to("Model_ab12", 0o777), "Model_ab12 can be written by others"),
        (open_to("../manifest.json", 0o602), "manifest.json can be written by others"),
        (open_to(".", 0o770), "graph can be written by others"),
        (open_to("..", 0o770), "tokens4 can be written by others"),
        (open_to("../..", 0o707), "rank0of2 can be written by others"),
        (open_to("../../../..", 0o770), "cache can be written by others"),
        (open_to("../../tokens4.lock", 0o666), "tokens4.lock can be written by others"),
    ],
)
def test_what_is_not_as_we_left_it_is_refused_and_kept(
    tmp_path: Path, tamper: Callable[[Path], None], why: str
) -> None:
    compile_once(tmp_path)
    tamper(home(tmp_path) / "graph")
    refused(tmp_path, why)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["graph/graph.om", "graph", "manifest.json", ".", "..", "../tokens4.lock"])
def test_what_belongs_to_someone_else_is_refused(tmp_path: Path, name: str) -> None:
    compile_once(tmp_path)
    os.chown(home(tmp_path) / name, 12345, -1)
    refused(tmp_path, "belongs to user 12345")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"compile cache: .*cache: not used, since .*Not a directory"):
        compile_once(tmp_path)


def test_the_cache_may_live_on_another_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to("disk")
    assert compile_once(tmp_path) == "no cache yet"
    assert compile_once(tmp_path) == ""


OTHER = """
import sys
from pathlib import Path
from tests.test_compile_cache import SHAPES, cache
with cache(Path(sys.argv[1]), patience_s=60).open(4, SHAPES) as entry:
    print("opened", entry.reason or "hit", flush=True)
    if not entry.hit:
        input()
        (entry.folder / "compiled_module").write_bytes(b"x")
    entry.seal()
"""


def start_other(root: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", OTHER, str(root)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def lines_until(process: "subprocess.Popen[str]", start: str) -> str:
    assert process.stdout
    return next(line for line in process.stdout if line.startswith(start)).strip()


def test_two_processes_take_turns(tmp_path: Path) -> None:
    """The second waits while the first compiles, and then uses what the first has sealed."""
    with start_other(tmp_path) as first:
        assert lines_until(first, "opened") == "opened no cache yet"
        with start_other(tmp_path) as second:
            lines_until(second, "compile cache: waiting for another process")
            assert first.stdin
            first.stdin.write("go on\n")
            first.stdin.flush()
            assert lines_until(second, "opened") == "opened hit"
    assert (first.returncode, second.returncode) == (0, 0)


def test_waiting_ends_with_an_error_and_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    with start_other(tmp_path) as first:
        lines_until(first, "opened")
        with pytest.raises(UserError, match=r"tokens4\.lock is held by another run of this case: wait for its end"):
            cache(tmp_path, patience_s=0.1).open(4, SHAPES)
        with pytest.raises(UserError, match="is held by another run"):
            clear_cache("some", tmp_path / "cache")
        cache(tmp_path, rank=1, patience_s=0).open(4, SHAPES).close()  # another rank's is free
        first.kill()
    assert compile_once(tmp_path) == "the last compile was interrupted"


def test_a_refusal_gives_the_lock_back(tmp_path: Path) -> None:
    compile_once(tmp_path)
    damage_size(home(tmp_path) / "graph")
    for _ in range(2):
        with pytest.raises(UserError, match="has changed"):
            cache(tmp_path, patience_s=0).open(4, SHAPES)


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    entry = cache(tmp_path).open(4, SHAPES)
    entry.close()
    entry.close()
    assert isinstance(cache(tmp_path, patience_s=0).open(4, SHAPES), Entry)


def test_clearing_removes_only_what_is_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "cache"
    compile_once(tmp_path)
    compile_once(tmp_path, tokens=8)
    damage_size(home(tmp_path) / "graph")  # damaged, but ours
    with cache(tmp_path, rank=1).open(4, SHAPES):
        pass  # interrupted, but ours
    foreign = root / "some" / "rank0of2" / "tokens16"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    (foreign.parent / "tokens32").symlink_to(foreign)
    with CompileCache("other", 0, 1, FACTS, root).open(4, SHAPES):
        pass
    capsys.readouterr()
    assert clear_cache("some", root) == 3
    assert f"{foreign}: left alone: manifest.json is unreadable" in capsys.readouterr().out
    assert (foreign / "thesis.txt").read_text() == "years of work"
    assert not home(tmp_path).exists()
    assert (root / "other" / "rank0of1" / "tokens4").exists()
    assert clear_cache("some", root) == 0
    assert clear_cache("never compiled", root) == 0
    assert compile_once(tmp_path) == "no cache yet"


def test_clearing_does_not_follow_links(tmp_path: Path) -> None:
    compile_once(tmp_path)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    (home(tmp_path) / "graph" / "link").symlink_to(tmp_path / "precious")
    assert clear_cache("some", tmp_path / "cache") == 1
    assert (tmp_path / "precious" / "file").exists()


@pytest.mark.parametrize("command", [["-m", "executor.launch", "demo", "--clear-cache"], ["run.py", "--clear-cache"]])
def test_the_commands_clear_and_stop(command: list[str]) -> None:
    environment = os.environ | {"CASE_NAME": "demo"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0 compiled graphs of case demo removed\n"), done.stderr


def test_the_source_digest_sees_names_and_text(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    one, two = tmp_path / "models" / "one.py", tmp_path / "two.py"
    one.write_text("a")
    two.write_text("b")
    digests = [source_digest(tmp_path, [tmp_path / "models", two])]
    assert source_digest(tmp_path, [two, tmp_path / "models", one]) == digests[0]  # neither order nor doubles matter
    one.write_text("ab")
    digests.append(source_digest(tmp_path, [tmp_path / "models", two]))
    one.rename(tmp_path / "models" / "three.py")
    digests.append(source_digest(tmp_path, [tmp_path / "models", two]))
    (tmp_path / "models" / "compiled.pyc").write_text("no source")
    assert source_digest(tmp_path, [tmp_path / "models", two]) == digests[-1]
    assert len(set(digests)) == 3


def test_facts_name_everything_a_graph_depends_on(tmp_path: Path) -> None:
    versions = Versions("2.13.0", "2.13.0", "9.1.0", "26.0")

    def facts(*overrides: str) -> dict[str, Any]:
        case = load_case("demo", overrides)
        return compile_facts(case, load_model_config(case), versions, "1.0", "f00")

    assert facts().keys() == {"torch", "torch_npu", "torchair", "cann", "python", "sources", "model", "case"}
    json.dumps(facts())
    assert first_difference(facts(), facts("batch_size=2")) == "case.data_config.batch_size was 4, is 2"
    assert first_difference(facts(), facts("prompts=[other]", "description=other")) == ""
