"""Runs on machines that refuse something from the beginning to the end; started by test_faults.py, without HOME."""

import errno
import sys
from pathlib import Path

from tests.faults.preload import Faults
from tests.faults.scenarios import CACHE, Offline, Rank

CENTURY = 100 * 365 * 86400


def main(folder: Path) -> None:
    folder.mkdir()
    faults = Faults()
    run = Offline(folder / "offline", faults)  # with the usual answer already: there is no HOME

    # Huge pages and the choice of a NUMA node are for speed alone.
    for kind in ("madvise", "mbind"):
        run.restore()
        faults.arm(run.root, kind, 1, forever=True)
        assert run.run().answer == run.usual, kind
    # A disk that is full when the packed weights are written, and has room again for the report.
    run.restore()
    faults.arm(run.root)
    run.run()
    faults.arm(run.root / CACHE, "write", 2, forever=True)
    run.restore()
    full = run.run()
    assert full.answer == run.usual
    assert "packed weights: not kept in" in full.ended.out
    assert "No space left on device" in full.ended.out
    assert not list((run.root / CACHE).iterdir())
    # A tree that cannot be written to.
    run.restore()
    faults.arm(run.root, "mkdir", 1, forever=True, error=errno.EROFS)
    ended = run.run().ended
    assert ended.status == 2
    assert len(ended.errors) == 1
    assert ended.err.startswith(f"error: {run.root}/results/tiny/")
    assert ended.err.endswith("cannot be created: Read-only file system\n")
    run.restore()
    faults.arm(run.root / CACHE, "mkdir", 1, forever=True, error=errno.EROFS)
    readonly = run.run()
    assert readonly.answer == run.usual
    assert "packed weights: not kept in" in readonly.ended.out
    # A wall clock that is far ahead or behind, and jumps while a server's rank runs.
    server = Rank(folder / "rank", faults)
    for jump in (CENTURY, -CENTURY // 4):
        server.restore()
        faults.arm(server.root)
        server.jump_s = jump
        assert server.run().answer == server.usual, jump
        assert faults.block.clock_s == jump
        faults.block.clock_s = 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
