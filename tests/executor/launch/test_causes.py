"""Why a job failed, by what its ranks have left; and the folder of a run."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from umbra.base.errors import EXIT_STATUS, UserError
from umbra.executor.launch.causes import Cause, cause_of
from umbra.executor.launch.results import create_results, discard_results, share_results

STACK = "Traceback\n  a line\nValueError: the cup is empty\n"


def failed(folder: Path, number: int, status: int, word: object = None, at: float | None = None) -> ProcessFailure:
    """Rank `number`, process 100 + `number`; `word` is what it has left, at this time."""
    path = folder / f"error{number}.json"
    path.unlink(missing_ok=True)
    if word is not None:
        path.write_text(json.dumps(word))
        if at is not None:
            os.utime(path, (at, at))
    return ProcessFailure(number, 100 + number, status, str(path))


def word(message: str = "", stack: str = "", follows: bool = False) -> dict[str, Any]:
    return {"message": {"message": message, "extraInfo": {"py_callstack": stack, "follows": follows, "timestamp": "1"}}}


def test_the_first_failure_is_the_one_that_the_others_follow_from(tmp_path: Path) -> None:
    early, late = (failed(tmp_path, n, 1, word("x"), at) for n, at in ((0, 200.0), (1, 100.0)))
    killed, aborted, ended = (
        failed(tmp_path, n, -number) for n, number in ((2, signal.SIGKILL), (3, signal.SIGABRT), (4, signal.SIGTERM))
    )

    def named(*failures: ProcessFailure) -> str:
        return cause_of({failure.local_rank: failure for failure in failures}, tmp_path, {}).text[:7]

    assert named(early, late, killed, aborted, ended) == "rank 2 "
    assert named(ended, aborted, early, late) == "rank 1 "  # the earliest word
    assert named(ended, aborted) == "rank 3 "


def test_the_cause_of_a_failed_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    who, logs = "rank 0 (pid 100)", f"; all ranks' logs: {tmp_path}"

    def cause(status: int, left: object = None, known: dict[int, str] | None = None, node: str = "") -> Cause:
        return cause_of({0: failed(tmp_path, 0, status, left)}, tmp_path, known or {}, node)

    assert cause(EXIT_STATUS, word("no such\ncase")) == Cause("no such case", EXIT_STATUS)
    assert cause(EXIT_STATUS) == Cause(f"{who} failed: exit status {EXIT_STATUS}{logs}")
    assert cause(1, word("refused")) == Cause(f"{who} failed: exit status 1: refused{logs}")
    assert cause(-9) == Cause(f"{who} failed: killed by SIGKILL{logs}")
    assert cause(-6) == Cause(f"{who} failed: killed by SIGABRT{logs}", follows=True)
    assert cause(-15) == Cause(f"{who} failed: killed by SIGTERM{logs}", follows=True)
    assert cause(-6, known={100: "halted too long"}) == Cause(f"{who} failed: halted too long{logs}")
    assert cause(1, word("lost", follows=True)) == Cause(f"{who} failed: exit status 1: lost{logs}", follows=True)
    assert capsys.readouterr().err == ""
    text = f"{who} failed: exit status 1: ValueError: the cup is empty{logs}"
    assert cause(1, word("ignored", STACK)) == Cause(text)
    assert capsys.readouterr().err == STACK
    assert cause(1, word("x", "ERR02123 DIST call failed")).follows
    assert cause(1, word("y" * 1000)).text == f"{who} failed: exit status 1: {'y' * 300}{logs}"
    named = f"{who} on node 3 (c) failed: killed by SIGKILL; logs on each node: {tmp_path}"
    assert cause(-9, node="node 3 (c)").text == named


def test_folders_of_runs(tmp_path: Path) -> None:
    folders = {create_results("case", tmp_path) for _ in range(3)}  # in the same second, or not
    assert len(folders) == 3
    for _ in range(2):
        assert share_results("case", "/any/where/now", tmp_path) == tmp_path / "case" / "now"
    assert (tmp_path / "case" / "now").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created: Not a directory"):
        create_results("x", tmp_path / "file")
    discard_results(tmp_path / "case" / "now")
    assert not (tmp_path / "case" / "now").exists()
    folder = folders.pop()
    (folder / "report.json").write_text("")
    discard_results(folder)  # only logs are discarded
    assert folder.exists()
