"""Environment variables are checked as they are read: an error names the variable and its value."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from executor.config import env
from executor.config.env import NodeEnv, RankEnv, node_env, rank_env
from umbra.errors import UserError

READ = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"]
READ += ["NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in READ:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_rank_on_one_node() -> None:
    assert rank_env() == RankEnv(0, 1, 0, 1, "")
    assert node_env() == NodeEnv(1, 0, "", 0)


def test_what_a_launcher_sets_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(READ, ["5", "8", "1", "4", "/errors", "2", "1", "host", "29500"], strict=True):
        monkeypatch.setenv(name, value)
    assert rank_env() == RankEnv(5, 8, 1, 4, "/errors")
    assert node_env() == NodeEnv(2, 1, "host", 29500)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"RANK": "-1"}, "environment variable RANK=-1 must be at least 0"),
        ({"RANK": "one"}, "environment variable RANK='one' is not an integer"),
        ({"WORLD_SIZE": "0"}, "environment variable WORLD_SIZE=0 must be at least 1"),
        ({"LOCAL_RANK": "-1"}, "environment variable LOCAL_RANK=-1 must be at least 0"),
        ({"LOCAL_WORLD_SIZE": "0"}, "environment variable LOCAL_WORLD_SIZE=0 must be at least 1"),
        ({"NNODES": "0"}, "environment variable NNODES=0 must be at least 1"),
        ({"NODE_RANK": "-1"}, "environment variable NODE_RANK=-1 must be at least 0"),
        ({"MASTER_PORT": "-1"}, "environment variable MASTER_PORT=-1 must be at least 0"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1 must be below NNODES=1"),
        ({"NNODES": "2", "MASTER_PORT": "1"}, "NNODES=2 also needs MASTER_ADDR and MASTER_PORT"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NNODES=2 also needs MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_impossible_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], complaint: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{re.escape(complaint)}"):
        _ = rank_env(), node_env()


PATHS: list[tuple[str, Callable[[], object]]] = [
    ("UMBRA_SERVE_SOCKET", env.serve_socket), ("IK_LLAMA", env.ik_llama), ("ASCEND_HOME_PATH", env.cann_home),
    ("ASCEND_TOOLKIT_HOME", env.cann_home),
]  # fmt: skip


@pytest.mark.parametrize(("name", "read"), PATHS)
def test_paths_are_none_where_nothing_is_set(
    monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[], object]
) -> None:
    for each, _ in PATHS:
        monkeypatch.delenv(each, raising=False)
    assert read() is None
    monkeypatch.setenv(name, "")
    assert read() is None
    monkeypatch.setenv(name, "/a/folder")
    assert read() == Path("/a/folder")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "/first")
    assert env.cann_home() == Path("/first")


def test_names_that_are_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CASE_NAME", "ASCEND_CUSTOM_OPP_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert (env.case_name(), env.custom_operators()) == (None, "")
    monkeypatch.setenv("CASE_NAME", "demo")
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", "/a:/b")
    assert (env.case_name(), env.custom_operators()) == ("demo", "/a:/b")
