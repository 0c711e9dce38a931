"""Parts and groups of ranks, and what is said if one of them is lost."""

from pathlib import Path

import pytest
from torch.distributed import DistError

from tests.ranks import run_ranks
from umbra.ops.parallel.connections import readable_connection_errors
from umbra.ops.parallel.groups import Shard
from umbra.ops.parallel.partitions import ParallelSizes, names_sharing, partitions


def test_parts_of_a_dimension_follow_each_other() -> None:
    assert [Shard(rank, 3).part(12) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    assert Shard().part(7) == slice(0, 7)
    assert [Shard(0, 4).padded(total) for total in (0, 1, 4, 5, 8)] == [0, 4, 4, 8, 8]


def test_ranks_are_divided_into_neighbours_and_strides() -> None:
    sizes = ParallelSizes(world=6, attn_tp=2, moe_tp=3, embed_tp=6, lmhead_tp=1)
    assert partitions(sizes) == {
        "world": ((0, 1, 2, 3, 4, 5),),
        "attn_tp": ((0, 1), (2, 3), (4, 5)),
        "attn_dp": ((0, 2, 4), (1, 3, 5)),
        "embed_tp": ((0, 1, 2, 3, 4, 5),),
        "lmhead_tp": ((0,), (1,), (2,), (3,), (4,), (5,)),
    }
    assert (sizes.attn_dp, sizes.moe_ep, sizes.physical(64)) == (3, 2, 64)
    assert ParallelSizes(world=6, moe_tp=3, expert_slots=5).physical(64) == 10
    assert names_sharing(sizes, "world") == names_sharing(sizes, "embed_tp") == ["world", "embed_tp"]
    assert names_sharing(sizes, "attn_dp") == ["attn_dp"]
    assert ParallelSizes() == ParallelSizes(1, 1, 1, 1, 1, 0)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.0.0.7]:5512"),
            "the connection to a rank at 10.0.0.7 is lost: its node says why it has ended",
        ),
        (RuntimeError("gloo: timed out"), "another rank does not answer: its node says why it has ended"),
        (DistError("x" * 250 + "\nmore"), "the connection to the launcher of node 0 is lost: " + "x" * 200),
    ],
)
def test_a_lost_rank_is_told_in_one_line(error: Exception, said: str) -> None:
    with pytest.raises(ConnectionError) as raised, readable_connection_errors():
        raise error
    assert str(raised.value) == said


def test_other_errors_are_kept() -> None:
    with pytest.raises(RuntimeError, match=r"^out of memory at \[10\.0\.0\.7\]:5512$"), readable_connection_errors():
        raise RuntimeError("out of memory at [10.0.0.7]:5512")


@pytest.mark.parametrize(
    ("world_size", "comparisons"),
    [(2, 72), *(pytest.param(*case, marks=pytest.mark.thorough) for case in ((3, 72), (4, 108)))],
)
def test_shares_equal_whole_rows(tmp_path: Path, world_size: int, comparisons: int) -> None:
    """Shares of a step's rows give the values of whole rows (gloo)."""
    done = run_ranks(tmp_path, world_size, ["tests/ops/parallel/rows_ranks.py"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{comparisons} comparisons, 4 mistakes" in done.stdout
