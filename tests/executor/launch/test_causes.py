"""Why a job failed, by what its ranks have left; what a rank leaves, and where its output goes."""

import errno
import io
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from executor.config.load import load_case
from executor.launch import launch as launch_module
from executor.launch import processes, rank, results
from executor.launch.launch import _cause, _first_failure, _meet, _words, launch
from executor.launch.nodes import Cause
from executor.launch.rank import _disk_full_is_a_user_error, _leave_word, run_rank
from executor.launch.results import Log, Tee, create_results, discard_results, open_log, share_results
from umbra.errors import EXIT_STATUS, UserError

STACK = "Traceback\n  a line\nValueError: the cup is empty\n"


def failed(folder: Path, number: int, status: int, word: object = None, at: float | None = None) -> ProcessFailure:
    """Rank `number`, process 100 + `number`; `word` is what it has left, at this time."""
    path = folder / f"error{number}.json"
    if word is not None:
        path.write_text(json.dumps(word))
        if at is not None:
            os.utime(path, (at, at))
    return ProcessFailure(number, 100 + number, status, str(path))


def error_of(*failures: ProcessFailure) -> ChildFailedError:
    return ChildFailedError("ranks", {failure.local_rank: failure for failure in failures})


def word(message: str = "", stack: str = "", follows: bool = False) -> dict[str, Any]:
    return {"message": {"message": message, "extraInfo": {"py_callstack": stack, "follows": follows, "timestamp": "1"}}}


def test_the_first_failure_is_the_one_that_the_others_follow_from(tmp_path: Path) -> None:
    early, late = (failed(tmp_path, n, 1, word("x"), at) for n, at in ((0, 200.0), (1, 100.0)))
    killed, aborted, ended = (
        failed(tmp_path, n, -number) for n, number in ((2, signal.SIGKILL), (3, signal.SIGABRT), (4, signal.SIGTERM))
    )
    assert _first_failure(error_of(early, late, killed, aborted, ended))[0] == 2
    assert _first_failure(error_of(ended, aborted, early, late))[0] == 1  # the earliest word
    assert _first_failure(error_of(ended, aborted))[0] == 3
    again = failed(tmp_path, 5, 3)
    again.timestamp, killed.timestamp = killed.timestamp, killed.timestamp + 5
    assert _first_failure(error_of(killed, again))[0] == 5


def test_the_words_of_a_rank_may_be_anything() -> None:
    assert _words(word("why", " stack\n", True)) == ("why", "stack", True)
    assert _words(word("why", "", False)) == ("why", "", False)
    for data in (None, [], {}, {"message": "why"}, {"message": {"message": 3, "extraInfo": 3}}):
        assert _words(data) == ("", "", False)
    odd = {"message": {"message": "why", "extraInfo": {"py_callstack": 3, "follows": 1}}}
    assert _words(odd) == ("why", "", False)


def test_the_cause_of_a_failed_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = f"; all ranks' logs: {tmp_path}"

    def cause(status: int, left: object = None, known: dict[int, str] | None = None, nodes: Any = None) -> Cause:
        (tmp_path / "error0.json").unlink(missing_ok=True)
        return _cause(error_of(failed(tmp_path, 0, status, left)), tmp_path, nodes, known or {})

    who = "rank 0 (pid 100)"
    assert cause(EXIT_STATUS, word("no such case")) == Cause("no such case", EXIT_STATUS)
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
    long = cause(1, word("y" * 1000)).text
    assert long == f"{who} failed: exit status 1: {'y' * 300}{logs}"
    here = SimpleNamespace(here=SimpleNamespace(node_rank=3), name=lambda rank: f"node {rank} (c)")
    assert cause(-9, nodes=here).text == f"{who} on node 3 (c) failed: killed by SIGKILL; logs on each node: {tmp_path}"


def test_a_world_that_nodes_do_not_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "node_env", lambda: SimpleNamespace(nnodes=3))
    with pytest.raises(UserError, match="NNODES=3 does not divide world_size: 8 of case demo"):
        launch(load_case("demo", ["world_size=8"]), ["x"])


def test_results_are_in_the_folder_that_node_0_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = load_case("demo", ["node_timeout_s=7", "join_timeout_s=9"])
    seen: list[Any] = []
    joined: Any = SimpleNamespace(join=lambda name: (seen.append(name), "run7")[1], watch=seen.append)
    monkeypatch.setattr(launch_module, "Nodes", lambda *given: (seen.append(given[1:]), joined)[1])
    monkeypatch.setattr(launch_module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(launch_module, "share_results", lambda case_name, name: tmp_path / case_name / name)
    monkeypatch.setattr(launch_module, "create_results", lambda case_name: tmp_path / case_name / "own")
    here: Any = SimpleNamespace(node_rank=1)
    assert _meet(case, here, "words") == (tmp_path / "demo" / "run7", joined)
    assert seen[:2] == [(7, 9), ""]
    here.node_rank = 0
    assert _meet(case, here, "words") == (tmp_path / "demo" / "own", joined)
    assert seen[4] == "own"


def test_one_rank_replaces_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[Any] = []
    monkeypatch.setattr(launch_module.os, "execv", lambda path, command: run.append((path, command)))
    monkeypatch.setattr(launch_module, "_launch_ranks", lambda *given: run.append(given[1]))
    monkeypatch.setattr(launch_module, "start_environment", lambda *given: {"UMBRA_TEST_LAUNCH": "1"})
    monkeypatch.setenv("UMBRA_TEST_LAUNCH", "0")
    launch(load_case("demo"), ["program", "x"])
    assert run[0] == (sys.executable, [sys.executable, "program", "x"])
    assert os.environ["UMBRA_TEST_LAUNCH"] == "1"
    del run[:]
    launch(load_case("demo", ["world_size=2"]), ["program", "x"])
    assert run == [["program", "x"]]


def test_a_word_says_what_failed(tmp_path: Path) -> None:
    def left(error: Exception) -> dict[str, Any]:
        _leave_word(tmp_path / "word.json", error)
        found: dict[str, Any] = json.loads((tmp_path / "word.json").read_text())["message"]
        assert int(found["extraInfo"].pop("timestamp")) > 1_700_000_000
        return found

    try:
        raise ValueError("the cup is empty")
    except ValueError as error:
        bug = left(error)
    assert bug["message"] == "the cup is empty"
    assert bug["extraInfo"]["py_callstack"].endswith("ValueError: the cup is empty\n")
    assert bug["extraInfo"]["follows"] is False
    assert left(ConnectionError("lost"))["extraInfo"]["follows"] is True
    assert left(KeyError())["message"] == "KeyError"
    refused = left(OSError(errno.ENOSPC, "No space left on device"))
    assert refused["extraInfo"]["py_callstack"] == ""
    assert "No space left on device" in refused["message"]


def test_a_full_disk_is_told_as_the_users_error(tmp_path: Path) -> None:
    def fails(number: int) -> Any:
        def body(folder: Path, ranks: object) -> None:
            raise OSError(number, os.strerror(number))

        return _disk_full_is_a_user_error(body)

    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with pytest.raises(UserError, match="cannot be written: "):
            fails(number)(tmp_path, None)
    with pytest.raises(OSError, match="Input/output"):
        fails(errno.EIO)(tmp_path, None)


def alone(monkeypatch: pytest.MonkeyPatch) -> tuple[io.StringIO, io.StringIO]:
    """This process as a rank without a launcher. -> what it shows and complains"""
    streams = io.StringIO(), io.StringIO()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    return streams


def test_a_rank_alone_leaves_no_folder_after_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    monkeypatch.setattr(rank, "create_results", lambda name: create_results(name, tmp_path))
    case, folders = load_case("demo"), list[Path]()

    def run(error: Exception | None, given: Path | None = None) -> bool:
        """Whether the folder is still there."""

        def body(folder: Path, ranks: Any) -> None:
            assert ranks.rank == 0
            folders.append(folder)
            if error:
                raise error

        if error:
            with pytest.raises(type(error)):
                run_rank(case, given, body)
        else:
            run_rank(case, given, body)
        return folders[-1].exists()

    assert run(None)
    assert folders[-1].parent == tmp_path / "demo"
    assert not run(UserError("bad"))
    assert run(UserError("bad"), create_results("given", tmp_path))  # its launcher's
    assert run(ValueError("a bug"))
    assert "Traceback" not in (folders[-1] / "rank0.log").read_text()
    assert run(MemoryError())
    assert "Traceback" in (folders[-1] / "rank0.log").read_text()  # shown as one line, and the rest is here


def test_folders_of_runs_in_the_same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results.time, "strftime", lambda form: "now")
    assert [create_results("case", tmp_path).name for _ in range(3)] == ["now", "now-2", "now-3"]
    assert create_results("other", tmp_path) == tmp_path / "other" / "now"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created: Not a directory"):
        create_results("x", tmp_path / "file")
    monkeypatch.setattr(Path, "mkdir", lambda *given, **more: (_ for _ in ()).throw(FileExistsError))
    with pytest.raises(UserError, match="a thousand runs in one second"):
        create_results("case", tmp_path)


def test_nodes_share_the_name_of_a_folder(tmp_path: Path) -> None:
    for _ in range(2):
        assert share_results("case", "/any/where/now", tmp_path) == tmp_path / "case" / "now"
    assert (tmp_path / "case" / "now").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created: "):
        share_results("x", "now", tmp_path / "file")


def test_only_logs_are_discarded(tmp_path: Path) -> None:
    folder = create_results("case", tmp_path)
    (folder / "rank0.log").write_text("")
    (folder / "report.json").write_text("")
    discard_results(folder)
    assert folder.exists()
    (folder / "report.json").unlink()
    discard_results(folder)
    assert not folder.exists()
    discard_results(folder)  # another node was quicker


class Full:
    """A file that takes three bytes at a time, and `room` in all."""

    def __init__(self, room: int):
        self.room, self.data = room, b""

    def write(self, data: Any) -> int:
        taken = min(3, len(data), self.room - len(self.data))
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.data += bytes(data[:taken])
        return taken


def test_a_log_that_fills_up_complains_once(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.file = file = Full(8)  # type: ignore[assignment]
    log.write("abcdefg")
    assert file.data == b"abcdefg"
    log.write("hij", loud=False)
    assert file.data == b"abcdefgh"
    with pytest.raises(UserError, match="log: cannot be written: No space left on device"):
        log.write("k")
    assert log.full
    log.write("l")
    with pytest.raises(UserError, match="cannot be written: "):
        Log(tmp_path / "no folder" / "log")
    kept = Log(tmp_path / "odd")
    kept.write("a\udce4b")
    kept.write("c")
    assert (tmp_path / "odd").read_text() == "a\\udce4bc"


def test_a_terminal_shows_what_the_log_has_and_bars(tmp_path: Path) -> None:
    terminal, log = io.StringIO(), Log(tmp_path / "log")
    tee = Tee(terminal, log, loud=True)
    assert tee.write("a line\n") == 7
    assert tee.write("\r50 %") == 5
    assert tee.getvalue() == "a line\n\r50 %"
    assert (tmp_path / "log").read_text() == "a line\n"


def test_the_log_of_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, complained = alone(monkeypatch)
    log = open_log(tmp_path, 0)
    print("out")
    print("error", file=sys.stderr)
    assert (shown.getvalue(), complained.getvalue()) == ("out\n", "error\n")
    assert (tmp_path / "rank0.log").read_text() == "out\nerror\n"
    log.file.close()
    log.file = Full(0)  # type: ignore[assignment]
    print("the disk is full", file=sys.stderr)
    with pytest.raises(UserError):
        print("more")
    moved: list[tuple[int, int]] = []
    monkeypatch.setattr(results.os, "dup2", lambda old, new: moved.append((old, new)))
    other = open_log(tmp_path, 3)
    assert other.path == tmp_path / "rank3.log"
    assert moved == [(other.file.fileno(), 1), (other.file.fileno(), 2)]


def test_what_the_system_knows_of_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert processes.state(5_000_000) == "X"
    assert processes.rank_of(5_000_000) is None
    assert processes.is_running(os.getpid())
    assert not processes.is_running(5_000_000)
    assert not processes.is_halted(os.getpid())
    for letter, running, halted in (("Z", False, False), ("T", True, True), ("t", True, True), ("S", True, False)):
        monkeypatch.setattr(processes, "state", lambda pid, letter=letter: letter)
        assert (processes.is_running(1), processes.is_halted(1)) == (running, halted)
    monkeypatch.setattr(processes, "children", lambda: [7, 8, 9, 10])
    monkeypatch.setattr(processes, "rank_of", lambda pid: {7: 2, 8: None, 9: 1, 10: 0}[pid])
    monkeypatch.setattr(processes, "is_running", lambda pid: pid != 10)
    assert list(processes.ranks_below().items()) == [(1, 9), (2, 7)]
