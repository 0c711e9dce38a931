"""Ways to place experts anew wrongly: each patches a half of a move, and raises no error of its own."""

from collections.abc import Callable

import pytest

from executor.engine.rebalancing import Rebalancing
from models.layers.experts import Experts


def weights_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rebalancing, "_move", lambda *_: 0)


def rows_stay(patch: pytest.MonkeyPatch) -> None:
    place, first = Experts.place, set[Experts]()

    def once(self: Experts, held: object) -> None:
        if self not in first:
            first.add(self)
            place(self, held)  # type: ignore[arg-type]

    patch.setattr(Experts, "place", once)


PLACEMENT_MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "weights_stay": weights_stay,
    "rows_stay": rows_stay,
}
