"""The programs that run while a call fails: a run of one case, and a rank of a server from its start to its end."""

import functools
import hashlib
import json
import os
import shutil
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from tests.faults.forks import Ended, Fork, forked, share_what_is_imported
from tests.faults.preload import Faults
from tests.tiny import save_tiny, write_case
from umbra.base.errors import run_main
from umbra.base.files import ROOT
from umbra.executor import model_runner as runner
from umbra.executor import rank_program
from umbra.executor.checkpoint.packed import PackedCache
from umbra.executor.config.load import load_case
from umbra.executor.config.resolved import write_resolved
from umbra.executor.engine.schedule.request import SamplingParams
from umbra.executor.engine.step import disk_prefixes
from umbra.executor.launch import results
from umbra.serving.ranks import worker
from umbra.serving.ranks.channel import HEADER, framed, length_of
from umbra.serving.ranks.messages import Fatal, Out, Ready, Stop, Submit, ToFront
from umbra.serving.ranks.processes import SOCKET
from umbra.text import tokenizer_record

LIMIT_S = 60.0  # on a machine that is busy; most take less than a second
CACHE, PAGES, RECORDS = "packed", "pages", "tokenizers"
KEPT = CACHE, PAGES, RECORDS  # what a start reads again


@dataclass(frozen=True)
class Outcome:
    ended: Ended
    answer: str  # what a user got; empty if that is nothing
    told: str = ""  # why the front of a server was told that the ranks end


class Scenario(ABC):
    """One program in a folder of its own, `root`, which has everything that it reads and writes."""

    name: str
    kinds: tuple[str, ...] = (
        "new",
        "tensor",
        "mmap",
        "madvise",
        "open",
        "read",
        "write",
        "rename",
        "fsync",
        "mkdir",
        "thread",
    )
    sections: ClassVar[dict[str, object]] = {}  # of the case
    arguments: Sequence[str] = ()
    shares = True  # whether its imports are found by running it by itself
    kept = False  # whether the packed cache is there at the start

    def __init__(self, root: Path, faults: Faults):
        self.root, self.faults, self.log = root, faults, root.with_suffix(".log")
        root.mkdir()
        (root / "tmp").mkdir()
        save_tiny(root / "model", vocab_size=4096, moe_intermediate_size=32)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "checkpoints/austen_moe" / name, root / "model" / name)
        usual: dict[str, Any] = {"threads": 1, "exe_mode": "graph", "data_config": {"prompts": ["The cat"]}}
        usual |= {"quantization": {"method": "q4", "keep_packed": True}}
        self.case = write_case(root / "tiny.yaml", root / "model", **usual | self.sections)
        self.fixed = sorted(root.rglob("*"))
        faults.arm(root)
        share_what_is_imported(self._counted if self.shares else list, self.log)
        outcome = self.run()
        self.usual = outcome.answer
        assert self.usual, f"{self.name} does not run: {outcome.told} {outcome.ended}"
        self.starts: set[str] = set()  # states of the files from which it has started well
        self.packed = root.with_suffix(".packed")
        if (root / CACHE).exists():
            (root / CACHE).rename(self.packed)
        self.restore()

    def restore(self) -> None:
        """Everything as it was before the first run."""
        for path in self.left():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if self.kept:
            shutil.copytree(self.packed, self.root / CACHE)

    def left(self) -> list[Path]:
        """The files and folders that were not there."""
        return sorted(set(self.root.rglob("*")) - set(self.fixed))

    def state(self) -> str:
        """A digest of the files that a start reads."""
        digest = hashlib.sha256()
        for path in self.left():
            if path.is_file() and path.relative_to(self.root).parts[0] in KEPT:
                digest.update(f"{path.relative_to(self.root)} {path.stat().st_size} ".encode() + path.read_bytes())
        return digest.hexdigest()

    @abstractmethod
    def run(self) -> Outcome:
        """Runs it once, and waits for its end."""

    def program(self) -> None:
        run_main(rank_program.main)

    def _counted(self) -> None:
        os.environ |= {"CASE_NAME": str(self.case), "TMPDIR": str(self.root / "tmp"), "TQDM_DISABLE": "1"}
        results.WORK = self.root  # type: ignore[attr-defined]
        tokenizer_record.RECORDS = self.root / RECORDS
        setattr(runner, "PackedCache", functools.partial(PackedCache, root=self.root / CACHE))  # noqa: B010
        sys.argv = [self.name, *self.arguments]
        self.faults.count(True)
        self.program()


class Offline(Scenario):
    """`run.py`, from the checkpoint."""

    name = "offline"

    def run(self) -> Outcome:
        ended = forked(self._counted, self.log, LIMIT_S)
        return Outcome(ended, "" if ended.status else answer_of(self.root))


class Kept(Offline):
    """`run.py`, from the packed cache."""

    name, kept = "kept", True


class Shadows(Offline):
    """`run.py` with experts on the CPU: a second pool, a thread that copies, plots and a trace in the results."""

    name = "shadows"
    sections: ClassVar[dict[str, object]] = {
        "offload_config": {"mode": "elastic", "arena_mb": 1, "shadow_threads": 1},
        "threads": 2,
    }


class Rank(Scenario):
    """The rank of a server: it loads, answers two requests of a front, and drains."""

    name, shares = "rank", False
    jump_s = 0  # by which the wall clock jumps when the rank is ready
    kinds = (*Scenario.kinds, "send")
    sections: ClassVar[dict[str, object]] = {
        "offload_config": {"mode": "elastic", "arena_mb": 1},
        "cache_config": {"page_size": 4, "disk_path": PAGES},
    }

    def run(self) -> Outcome:
        path, launched = self.root / "tmp" / "engine", self.root / "results" / "tiny" / "20260101-000000"
        launched.mkdir(parents=True, exist_ok=True)
        write_resolved(load_case(str(self.case)), launched / "case.json")
        self.arguments = ["--results", str(launched), "--resolved", str(launched / "case.json")]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            front = Fork(functools.partial(talk, listener, self._jump), self.root.with_name("front.log"))
            rank = Fork(self._counted, self.log)
        ended = rank.wait(LIMIT_S)
        seen = front.wait(5)
        path.unlink()
        if seen.status:
            return Outcome(ended, "", f"the front failed: {seen.err}")
        said = json.loads(seen.out)
        return Outcome(ended, said["answer"] if not ended.status else "", said["told"])

    def _jump(self) -> None:
        self.faults.block.clock_s = self.jump_s

    def program(self) -> None:
        os.environ[SOCKET] = str(self.root / "tmp" / "engine")
        disk_prefixes.DEEP = 1
        setattr(disk_prefixes, "located", self.root.joinpath)  # noqa: B010
        run_main(worker.main)


def answer_of(root: Path) -> str:
    """The tokens in the report of the run; empty if there is none."""
    (report, *_) = [*root.glob("results/*/*/report.json"), None]
    return json.dumps([c["tokens"] for c in json.loads(report.read_text())["completions"]]) if report else ""


def talk(listener: socket.socket, begun: Callable[[], None]) -> None:
    """A front: sends two requests when the rank is ready, lets it end when both are answered, and prints what it was
    told."""
    listener.settimeout(LIMIT_S)
    said = {"answer": "", "told": ""}
    tokens: dict[int, list[int]] = {1: [], 2: []}
    open_requests = set(tokens)
    try:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as stream:
            while header := stream.read(HEADER.size):
                message = msgspec.msgpack.decode(stream.read(length_of(header)), type=ToFront)
                if isinstance(message, Ready):
                    begun()
                    for id in tokens:
                        connection.sendall(framed(Submit(id, [id, 2, 3], SamplingParams(4, ignore_eos=True))))
                elif isinstance(message, Fatal):
                    said["told"] = message.reason
                elif isinstance(message, Out):
                    for row in message.rows:
                        tokens.setdefault(row.id, []).extend(row.tokens)  # also of the warm-up
                        open_requests -= {row.id} if row.finish else set()
                    if not open_requests:
                        said["answer"] = json.dumps([tokens[1], tokens[2]])
                        connection.sendall(framed(Stop()))
    except OSError:  # the rank has gone, or never came
        pass
    print(json.dumps(said))


SCENARIOS: dict[str, type[Scenario]] = {scenario.name: scenario for scenario in (Offline, Kept, Shadows, Rank)}
