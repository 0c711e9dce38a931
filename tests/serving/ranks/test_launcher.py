"""The ranks of a server on another node than the first: when they are started again, and what their end says."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.ranks.launcher import keep_ranks
from umbra.errors import EXIT_STATUS

# A launcher that ends as the next of its arguments says, and counts its starts in a file.
LAUNCHER = """
import os, pathlib, sys, time
starts, *ends = sys.argv[1:]
with open(starts, "a") as file: file.write("x")
end = int(ends[len(pathlib.Path(starts).read_text()) - 1])
if end == 15:
    os.kill(os.getppid(), end)
    time.sleep(60)
os.kill(os.getpid(), -end) if end < 0 else sys.exit(end)
"""


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


ENDS = [  # how launchers end, how many are started, the status in the end
    ([0], 1, 0), ([EXIT_STATUS], 1, EXIT_STATUS), ([143], 1, 143), ([1, 0], 2, 0), ([1, 127, 1], 3, 1),
    ([-9, 0], 2, 0), ([15], 1, 143),
]  # fmt: skip


@pytest.mark.parametrize(("ends", "started", "status"), ENDS)
def test_ranks_are_started_again_with_those_of_all_nodes(
    tmp_path: Path, handlers: None, capfd: pytest.CaptureFixture[str], ends: list[int], started: int, status: int
) -> None:
    """At most twice here, and not if the case is wrong, or if somebody has asked this process (15) or them to end."""
    starts = tmp_path / "starts"
    assert keep_ranks(["-c", LAUNCHER, str(starts), *map(str, ends)], restarts=2) == status
    assert starts.read_text() == "x" * started
    shown = capfd.readouterr()
    assert shown.out.splitlines() == [f"starting this node's ranks again ({n} of 2)" for n in range(1, started)]
    assert (") failed: killed by SIGKILL" in shown.err) == (-9 in ends)
