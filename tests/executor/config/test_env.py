"""Environment variables are checked as they are read: an error names the variable and its value."""

import re

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


def test_folders_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("UMBRA_SERVE_SOCKET", "IK_LLAMA", "ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "ASCEND_CUSTOM_OPP_PATH")
    for name in (*names, "CASE_NAME"):
        monkeypatch.delenv(name, raising=False)
    assert (env.serve_socket(), env.ik_llama(), env.cann_home(), env.custom_operators()) == (None, None, None, "")
    assert env.case_name() is None
    for name in (*names, "CASE_NAME"):
        monkeypatch.setenv(name, f"/{name}")
    assert (str(env.serve_socket()), str(env.ik_llama())) == ("/UMBRA_SERVE_SOCKET", "/IK_LLAMA")
    assert str(env.cann_home()) == "/ASCEND_TOOLKIT_HOME"
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "")
    assert str(env.cann_home()) == "/ASCEND_HOME_PATH"
    assert (env.custom_operators(), env.case_name()) == ("/ASCEND_CUSTOM_OPP_PATH", "/CASE_NAME")
