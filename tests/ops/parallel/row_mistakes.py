"""Ways to share the rows of a step wrongly: each patches `RowShares`, and raises no error of its own."""

from collections.abc import Callable

import pytest
from torch import Tensor

from umbra.ops.parallel.rows import RowShares


def each_takes_the_first_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowShares, "own", lambda self, x: x[: len(x) // self.parallel.attn_tp.size])


def own_rows_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowShares, "sum", RowShares.own)


def shares_out_of_order(patch: pytest.MonkeyPatch) -> None:
    gather = RowShares.gather

    def turned(self: RowShares, x: Tensor) -> Tensor:
        return gather(self, x).roll(len(x), 0)

    patch.setattr(RowShares, "gather", turned)


def experts_of_other_ranks_are_left_out(patch: pytest.MonkeyPatch) -> None:
    def own(self: RowShares, x: Tensor) -> Tensor:
        return self.parallel.world.own_rows(x, self.counts)

    patch.setattr(RowShares, "sum_all", own)


ROW_MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "each_takes_the_first_share": each_takes_the_first_share,
    "own_rows_are_not_summed": own_rows_are_not_summed,
    "shares_out_of_order": shares_out_of_order,
    "experts_of_other_ranks_are_left_out": experts_of_other_ranks_are_left_out,
}
