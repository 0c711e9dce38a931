"""The guard of compiled graphs: which are used, compiled again or refused. A file stands for torchair's graph."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import umbra
from umbra.base.errors import UserError
from umbra.executor.config.load import load_case, load_model_config
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.platform.ascend.compile_cache import (
    LIMIT,
    CompileCache,
    clear_cache,
    compile_facts,
    first_difference,
)
from umbra.executor.platform.ascend.versions import Versions

FACTS = {"torch": "2.13.0", "torch_npu": "2.13.0", "case": {"data_config": {"batch_size": 4}, "sizes": (1, 2)}}
SHAPES = [[[4], "int64"]]


def cache(root: Path, facts: dict[str, Any] = FACTS, **options: Any) -> CompileCache:
    return CompileCache("some", options.pop("rank", 0), options.pop("world_size", 2), facts, root / "cache", **options)


def compile_once(root: Path, facts: dict[str, Any] = FACTS, tokens: int = 4) -> str:
    """Open, compile if necessary, seal and close an entry; returns the reason for compiling, empty for a hit."""
    with cache(root, facts).open(f"forward_{tokens}", SHAPES) as entry:
        if not entry.hit:
            (entry.folder / "Model_ab12").mkdir()
            (entry.folder / "Model_ab12" / "compiled_module").write_bytes(b"x" * 1000)
            (entry.folder / "graph.om").write_bytes(b"y")
        entry.seal()
    return entry.reason


def home(root: Path) -> Path:
    return root / "cache" / "some" / "rank0of2" / "forward_4"


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


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"torch_npu": "2.8.0"}, 'torch_npu was "2.13.0", is "2.8.0"'),
        ({"case": {"data_config": {"batch_size": 8}, "sizes": (1, 2)}}, "case.data_config.batch_size was 4, is 8"),
        ({"sources": "f00"}, "sources is new"),
    ],
)
def test_a_changed_fact_compiles_anew_and_is_named(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    compile_once(tmp_path)
    (home(tmp_path) / "graph" / "graph.om").write_bytes(b"z")  # not read, because the facts differ
    assert compile_once(tmp_path, FACTS | changed) == reason
    assert compile_once(tmp_path, FACTS | changed) == ""
    assert (home(tmp_path) / "graph" / "graph.om").read_bytes() == b"y"  # no old file is left


def test_an_interrupted_compile_starts_again(tmp_path: Path) -> None:
    entry = cache(tmp_path).open("forward_4", SHAPES)
    (entry.folder / "half").write_bytes(b"x")
    entry.close()
    assert compile_once(tmp_path) == "the last compile was interrupted"
    assert compile_once(tmp_path) == ""
    assert not (entry.folder / "half").exists()


def link(path: Path, away: Path) -> None:
    """A symbolic link takes the place of `path`."""
    path.rename(away)
    path.symlink_to(away)


@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (lambda home: (home / "graph/graph.om").write_bytes(b"z"), "graph.om has changed since it was written"),
        (lambda home: (home / "graph/graph.om").unlink(), "graph.om is missing"),
        (lambda home: (home / "notes.txt").touch(0o600), "it holds notes.txt, which is not ours"),
        (lambda home: link(home / "graph/graph.om", home.parent / "away"), "graph.om is a symbolic link"),
        (lambda home: (home / "manifest.json").unlink(), "it holds graph, but no manifest.json"),
        (lambda home: os.truncate(home / "manifest.json", LIMIT + 1), f"has {LIMIT + 1} bytes, more than {LIMIT}"),
        (lambda home: (home / "graph/graph.om").chmod(0o620), "graph.om can be written by others (mode 620)"),
        (lambda home: home.parent.chmod(0o707), "rank0of2 can be written by others"),
    ],
)
def test_what_is_not_as_we_left_it_is_refused_and_kept(
    tmp_path: Path, tamper: Callable[[Path], object], why: str
) -> None:
    compile_once(tmp_path)
    tamper(home(tmp_path))
    refused(tmp_path, why)


def test_clearing_removes_only_what_is_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "cache"
    compile_once(tmp_path)
    compile_once(tmp_path, tokens=8)
    (home(tmp_path) / "graph/graph.om").write_bytes(b"yy")  # damaged, but ours
    with cache(tmp_path, rank=1).open("forward_4", SHAPES):
        pass  # interrupted, but ours
    foreign = root / "some" / "rank0of2" / "tokens16"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with CompileCache("other", 0, 1, FACTS, root).open("forward_4", SHAPES) as other:
        (foreign.parent / "tokens32").symlink_to(other.home)
    capsys.readouterr()
    assert clear_cache("some", root) == 3
    assert f"{foreign}: left alone: manifest.json is unreadable" in capsys.readouterr().out
    assert (foreign / "thesis.txt").read_text() == "years of work"
    assert not home(tmp_path).exists()
    assert other.folder.exists()
    assert clear_cache("some", root) == 0
    assert clear_cache("never compiled", root) == 0
    assert compile_once(tmp_path) == "no cache yet"


def test_the_command_clears_and_stops() -> None:
    done = umbra("clear-cache", "demo")
    assert (done.returncode, done.stdout) == (0, "0 compiled graphs of case demo removed\n"), done.stderr


def test_facts_name_everything_a_graph_depends_on(tmp_path: Path) -> None:
    versions = Versions("2.13.0", "2.13.0", "9.1.0", "26.0")

    def facts(*overrides: str, built: int = 0, communicator: str = "") -> dict[str, Any]:
        case = load_case("demo", overrides)
        return compile_facts(
            platform_settings(case).graph_facts, load_model_config(case), versions, "1.0", "f00", built, communicator
        )

    made_by = {"torch", "torch_npu", "torchair", "cann", "python", "sources", "kernels_built", "communicator"}
    assert facts().keys() == made_by | {"model", "case"}
    assert first_difference(facts(), facts("batch_size=2")) == "case.data_config.batch_size was 4, is 2"
    assert first_difference(facts(), facts(built=5)) == "kernels_built was 0, is 5"
    assert first_difference(facts(), facts(communicator="g2")) == 'communicator was "", is "g2"'
    assert first_difference(facts(), facts("prompts=[other]", "description=other")) == ""


def test_waiting_for_another_run_ends_with_an_error(tmp_path: Path) -> None:
    with cache(tmp_path).open("forward_4", SHAPES):
        with pytest.raises(UserError, match=r"forward_4\.lock is held by another run of this case: wait for its end"):
            cache(tmp_path, patience_s=0.1).open("forward_4", SHAPES)
        with pytest.raises(UserError, match="is held by another run"):
            clear_cache("some", tmp_path / "cache")
        cache(tmp_path, rank=1, patience_s=0).open("forward_4", SHAPES).close()  # the entry of another rank is free
