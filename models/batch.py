"""`Batch`: the tokens of one step and where their keys and values lie. It is all that a model's step gets."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from umbra.ops.interface import Paged, Recurrent
from umbra.ops.parallel.groups import Parallel
from umbra.ops.parallel.rows import GroupRows, RowShares

LENGTHS = "query_starts", "kv_lens"  # fields of `Paged` that are the same for all sets of layers
STATES = "states_"  # before the names of `Recurrent`'s fields


@dataclass(frozen=True)
class Subset:
    """Some rows of a batch, with the metadata of a batch of these alone; no tokens are written there."""

    rows: Tensor  # (n) int64, ascending
    paged: tuple[Paged, ...]

    def to(self, device: torch.device) -> "Subset":
        def moved(paged: Paged) -> Paged:
            tensors = {name: x.to(device) for name, x in paged._asdict().items() if isinstance(x, Tensor)}
            return paged._replace(**tensors)

        return Subset(self.rows.to(device), tuple(map(moved, self.paged)))


@dataclass(frozen=True)
class Batch:
    """T new tokens of S sequences, packed one sequence after another. In a decode step T = S."""

    token_ids: Tensor  # (T) int64
    positions: Tensor  # (T) int64
    paged: tuple[Paged, ...]  # of each set of layers (executor/plan/layer_sets.py), with the same lengths
    logit_rows: Tensor | None  # the rows of T whose logits are wanted; None: all
    tokens_per_group: tuple[int, ...] | None  # T of every data-parallel group; None: all groups have the same T
    sequence_parallel: bool = False  # whether ranks hold shares of the rows outside attention and experts
    # Number of `logit_rows` of every data-parallel group, if no others are to be computed after the last attention; ():
    # the same of all groups.
    wanted_per_group: tuple[int, ...] | None = None
    # The places of states, of a model that has layers with states: each table has a row (S) for every such layer.
    recurrent: Recurrent | None = None
    # The rows for which attention over latents makes each head's keys and values of them; None: no rows. Where there
    # are other rows, `absorbed` has those.
    expanded: Subset | None = None
    absorbed: Subset | None = None
    # (T, N) int64, of a model that reads n-grams: the N tokens before each of `token_ids`, the nearest first; -1: none.
    previous: Tensor | None = None
    # Of a step that guesses tokens: the hidden states (T, H) of the tokens before `token_ids`.
    hidden: Tensor | None = None

    def rows(self, parallel: Parallel) -> GroupRows:
        """The rows of the step that a rank with this position in the splits holds outside attention and experts."""
        return (RowShares if self.sequence_parallel else GroupRows)(parallel, self.tokens_per_group)

    @property
    def even(self) -> bool:
        """Says whether all data-parallel groups have equally many tokens. Every rank gets the same answer."""
        return self.tokens_per_group is None or len(set(self.tokens_per_group)) == 1

    @property
    def with_all_rows(self) -> "Batch":
        """The batch for layers before the last, which compute all rows to their end."""
        return self if self.wanted_per_group is None else dataclasses.replace(self, wanted_per_group=None)

    def wanted(self, x: Tensor, carried: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...], "Batch"]:
        """Returns `x`, what is `carried` beside it and the batch for the rest of a layer after its attention; in the
        last layer they lack the rows whose logits nobody wants."""
        rows, counts = self.logit_rows, self.wanted_per_group
        if rows is None or counts is None:
            return x, carried, self
        x, carried = x.index_select(0, rows), tuple(of.index_select(0, rows) for of in carried)
        return x, carried, dataclasses.replace(self, tokens_per_group=counts or None)

    def picked(self, x: Tensor) -> Tensor:
        """Returns the rows of hidden states `x` whose logits are wanted."""
        rows = self.logit_rows
        return x if rows is None or self.wanted_per_group is not None else x.index_select(0, rows)

    def fields(self) -> dict[str, Any]:
        """All fields by name, also those of `paged`, which have the number of their set in their names after the
        first, and those of `recurrent`. All sets have the lengths of the first."""
        fields = {name: value for name, value in vars(self).items() if name not in ("paged", "recurrent")}
        for i, paged in enumerate(self.paged):
            fields |= {_numbered(name, i): v for name, v in paged._asdict().items() if not i or name not in LENGTHS}
        if self.recurrent:
            fields |= {STATES + name: value for name, value in self.recurrent._asdict().items()}
        return fields

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors, which are the inputs of a captured graph that differ from step to step."""
        return {name: value for name, value in self.fields().items() if isinstance(value, Tensor)}

    def having(self, tensors: Mapping[str, Tensor]) -> "Batch":
        """The batch with other `tensors`, under the names that `tensors()` gives them."""
        paged: list[Paged] = []
        own: dict[str, Any] = dict(tensors)
        for i, before in enumerate(self.paged):
            named = {name: _numbered(name, i) for name in Paged._fields}
            lengths = {name: getattr(paged[0], name) for name in LENGTHS} if i else {}
            paged.append(before._replace(**lengths, **{name: own.pop(n) for name, n in named.items() if n in own}))
        states = {name: own.pop(STATES + name) for name in Recurrent._fields if STATES + name in own}
        recurrent = self.recurrent and self.recurrent._replace(**states)
        return dataclasses.replace(self, paged=tuple(paged), recurrent=recurrent, **own)

    def with_lengths(self, kv_lens: Tensor) -> "Batch":
        """The batch with `kv_lens` in every set of layers."""
        return dataclasses.replace(self, paged=tuple(paged._replace(kv_lens=kv_lens) for paged in self.paged))

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`, for a step that no graph computes: the places of states stay on the host, which reads
        them."""
        if device.type == "cpu":  # where batches are made
            return self
        tensors = self.tensors().items()
        moved = self.having({name: tensor.to(device) for name, tensor in tensors if not name.startswith(STATES)})
        expanded, absorbed = (rows and rows.to(device) for rows in (self.expanded, self.absorbed))
        return dataclasses.replace(moved, expanded=expanded, absorbed=absorbed)


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name
