"""The rows of a step's tensors that a rank holds outside attention and experts: what norms and routers compute.

A group's sum is an all-reduce, or a reduce-scatter and then, where all rows are needed, an all-gather: the same bytes
over the links, but what lies between the two computes only a part of the rows on each rank (sequence parallelism).
"""

from torch import Tensor

from umbra.ops.parallel.groups import Parallel


class GroupRows:
    """A rank holds all rows of its data-parallel group. `counts` is the number of rows of each group; None: all groups
    have equally many."""

    def __init__(self, parallel: Parallel, counts: tuple[int, ...] | None):
        self.parallel, self.counts, self.group_counts = parallel, counts, counts

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of `x`, which has all rows of the group."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All rows of the group; `x` has this rank's rows."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum of `x` over the ranks that share an attention layer. `x` has all rows of the
        group and may be overwritten."""
        return self.parallel.attn_tp.all_reduce(x)

    def gather_all(self, x: Tensor) -> Tensor:
        """The rows of all groups; `x` has this rank's rows."""
        return self.parallel.attn_dp.gather_rows(x, self.counts)

    def of_group(self, x: Tensor) -> Tensor:
        """The rows of this rank's group, a view of `x`, which has the rows of all groups."""
        return self.parallel.attn_dp.own_rows(x, self.group_counts)

    def sum_all(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum of `x` over all ranks. `x` has the rows of all groups and may be overwritten."""
        return self.parallel.attn_dp.own_rows(self.parallel.world.all_reduce(x), self.counts)


class RowShares(GroupRows):
    """The ranks that share an attention layer hold equal shares of the rows of their group, in the order of ranks.
    Their number divides `counts`."""

    def __init__(self, parallel: Parallel, counts: tuple[int, ...] | None):
        ranks = parallel.attn_tp.size
        super().__init__(parallel, counts)
        self.counts = counts and tuple(count // ranks for count in counts for _ in range(ranks))

    def own(self, x: Tensor) -> Tensor:
        return self.parallel.attn_tp.own_rows(x, None).clone()  # or it would keep the memory of all rows

    def gather(self, x: Tensor) -> Tensor:
        return self.parallel.attn_tp.gather_rows(x, None)

    def sum(self, x: Tensor) -> Tensor:
        return self.parallel.attn_tp.sum_rows(x, None)

    def gather_all(self, x: Tensor) -> Tensor:
        return self.parallel.world.gather_rows(x, self.counts)

    def sum_all(self, x: Tensor) -> Tensor:
        return self.parallel.world.sum_rows(x, self.counts)
