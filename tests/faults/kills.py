"""Kills processes that write packed weights, or prefixes, at random moments:

    python -m tests.faults.kills [--times 1000]

After each kill another process starts, which must find what was written whole or not at all, can write it anew,
and leaves no temporary file of a dead process. Before that, the order of calls is checked that a loss of power needs:
what is renamed is on the disk.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.faults.forks import Fork, forked
from tests.faults.preload import LIBRARY, Faults, unsynced, with_faults
from umbra.executor.checkpoint.packed import PackedCache
from umbra.executor.engine.memory.page_store import PageStore, Record
from umbra.models.layers.base import Layer
from umbra.ops.cpu.engine import start
from umbra.ops.cpu.memory import allocate, clear, is_allocated

SIZES = (1 << 20, 300_000, 70)  # bytes of the packed storages; the last one is small
PAGE = 1 << 20


class Storages(Layer):
    """A layer with memory like that of packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = [torch.frombuffer(allocate(size, 0), dtype=torch.uint8) for size in SIZES[:-1]]
        self.tensors.append(torch.zeros(SIZES[-1], dtype=torch.uint8))

    def storages(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors)


class Writer:
    """Writes versions of packed weights into a folder, again and again."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "checkpoint").mkdir(parents=True)
        self.layer = Storages()
        model = torch.nn.Sequential(self.layer)
        self.cache = PackedCache({}, folder / "checkpoint", 0, model, folder / "made")

    def forget(self) -> None:
        """As if nothing had ever been written."""
        shutil.rmtree(self.folder / "made", ignore_errors=True)

    def write(self, version: int) -> None:
        for tensor in self.layer.tensors:
            if is_allocated(tensor):
                clear(tensor)  # a mapped file cannot be written to
            tensor.fill_(version % 251)
        self.cache.save()

    def check(self) -> str:
        """Returns what the next start finds, "whole" or "none". Raises if it finds something else."""
        if not self.cache.load(False):
            return "none"
        values = {int(value) for tensor in self.layer.tensors for value in (tensor.min(), tensor.max())}
        assert len(values) == 1, values
        return "whole"


class PageWriter:
    """Writes pages into a store that has room for a few versions of them, again and again."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.store: PageStore | None = None
        folder.mkdir()

    def forget(self) -> None:
        shutil.rmtree(self.folder / "pages", ignore_errors=True)

    def open(self) -> PageStore:
        store = PageStore(self.folder / "pages", b"", 32 * PAGE, lambda name: PAGE)
        store.scan()
        return store

    def write(self, version: int) -> None:
        store = self.store = self.store or self.open()
        names = (b"%d %d" % (version, page) for page in range(4))
        store.write([Record(name, b"%d" % (version % 2), page_of(name), time.time()) for name in names])

    def check(self) -> str:
        """Returns what the next start finds; "torn": a part of a record behind whole ones, which it cuts."""
        left = sum(path.stat().st_size for path in self.folder.rglob("*.pages"))
        store, buffer = self.open(), memoryview(bytearray(PAGE))
        for name in list(store.index):
            assert store.read(name, buffer), name
            assert buffer == page_of(name), name
        return "torn" if store.bytes < left else "whole" if store.index else "none"


def page_of(name: bytes) -> bytes:
    return random.Random(name).randbytes(PAGE)


def kill_writers(writer: Writer | PageWriter, times: int, generator: random.Random) -> Counter[str]:
    """Returns the number of times that each outcome occurred. Raises if one is wrong."""
    log, ends = writer.folder.with_suffix(".log"), Counter[str]()

    def write_four() -> None:
        for version in range(4):
            writer.write(version)

    def write_on() -> None:
        for version in range(generator.randrange(250), 10**9):
            writer.write(version)

    def check() -> None:
        print("found", writer.check())
        left = sorted(writer.folder.rglob("*.tmp"))
        assert not left, left
        writer.write(1)
        writer.write(2)
        assert writer.check() == "whole"

    begun = time.monotonic()
    assert not forked(write_four, log).status
    longest = (time.monotonic() - begun) / 2
    for _ in range(times):
        if generator.random() < 0.5:
            writer.forget()
        victim = Fork(write_on, log)
        time.sleep(generator.uniform(0, longest))
        victim.kill()
        victim.wait(10)
        ended = forked(check, log)
        if ended.status:
            raise AssertionError(f"{ended.out[-1000:]} {ended.err[-3000:]}")
        ends[next(line for line in ended.out.splitlines() if line.startswith("found")).split()[1]] += 1
    return ends


def calls_of(writer: Writer, faults: Faults) -> str:
    """The calls of three versions that are written one after the other."""
    path = writer.folder.with_suffix(".calls")
    faults.arm(writer.folder)
    faults.block.log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        for version in range(3):
            writer.write(version)
    finally:
        os.close(faults.block.log)
        faults.block.log = -1
    return path.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000, help="kills in all")
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as top:
        if LIBRARY not in os.environ:
            command, environment = with_faults(["-m", "tests.faults.kills", *sys.argv[1:]], Path(top))
            sys.exit(subprocess.run(command, env=environment).returncode)
        start(1, "auto")
        faults, generator, folder = Faults(), random.Random(args.seed), Path(top)
        ordered = Writer(folder / "calls")
        calls = forked(lambda: print(calls_of(ordered, faults)), folder / "calls.log").out
        renames = calls.count("rename\t")
        wrong = unsynced("\n".join(line for line in calls.splitlines() if line.count("\t") == 2))
        for writer in (Writer(folder / "kills"), PageWriter(folder / "pages")):
            ends = kill_writers(writer, args.times, generator)
            print(f"{args.times} kills of a {type(writer).__name__}: {dict(ends)}")
        print(f"{renames} renames of what is on the disk")
        print(*wrong, f"--seed {args.seed}", sep="\n")
        sys.exit(bool(wrong) or not renames)


if __name__ == "__main__":
    main()
