"""Packs the next tokens of sequences into one batch, without padding between prompts of different lengths."""

from array import array
from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from umbra.executor.engine.memory.pages import Pages, States
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.models.batch import Batch, Subset
from umbra.ops.interface import Ops, Paged, Recurrent, tensor_of

PADDING_LENGTH = 2  # not 0 or 1, which compilers treat as constants


def pack(
    ops: Ops,
    sequences: ListOf[Sequence],
    pool: Pages,
    tokens_per_group: tuple[int, ...],
    table_width: int,
    all_logits: bool = False,
    rows: int = 0,
    sequence_parallel: bool = False,
    decode: bool = False,
    wanted_per_group: tuple[int, ...] | None = None,
    sets: int = 1,
    state_layers: int = 0,
    aside: bool = False,
) -> Batch:
    """Returns the batch of `sequences`, with its tensors on the host. All sequences belong to this rank's data-parallel
    group, and their pages are reserved, for `sets` sets of layers; so are their states in `state_layers` layers. With
    `aside` one more set has the pages of caches that lie aside: those of the first set, numbered without gaps.

    In a decode step each token is a row by itself, with its own block table and length, also where several are of one
    sequence: so drafted tokens are computed as they would be without drafts. All rows' keys are written before any row
    attends to them.

    For graphs of fixed sizes, and for equal shares of ranks, the batch is padded to `rows` rows, with one token
    each. Padding tokens are written to a page that no sequence holds.
    """
    ids: array[int] = array("q")
    positions: array[int] = array("q")
    starts: array[int] = array("q", [0])
    lengths: array[int] = array("q")
    rows_wanted: array[int] = array("q")
    places, states = Places(pool, table_width, sets, aside), StateRows(state_layers)
    expanded, absorbed = Picked(), Picked()
    for s in sequences:
        first = len(ids)
        computed, end = s.num_computed, s.end
        ids += s.ids[computed:end]
        positions.extend(range(computed, end))
        rows_of_it = range(computed + 1, end + 1) if decode else (end,)
        places.add(s, range(computed, end), len(rows_of_it))
        for last in rows_of_it:
            lengths.append(last)
            starts.append(starts[-1] + 1 if decode else len(ids))
        if not decode:
            kept = max(0, min(s.expanded, end) - computed)  # the first ones
            expanded.add(len(lengths) - 1, first, first + kept, computed + kept)
            absorbed.add(len(lengths) - 1, first + kept, len(ids), end)
        if not all_logits:
            rows_wanted.extend(range(len(ids) - s.logit_rows, len(ids)))
        if state_layers:
            states.add(s, len(ids))
    for row in range(rows - len(lengths)):
        ids.append(0)
        positions.append(0)
        places.pad(row)
        lengths.append(PADDING_LENGTH)
        starts.append(len(ids))
        rows_wanted.append(len(ids) - 1)
        absorbed.add(len(lengths) - 1, len(ids) - 1, len(ids), PADDING_LENGTH)
    tables_of = places.tables()
    return Batch(
        tensor_of(ids),
        tensor_of(positions),
        places.paged(ops, tables_of, starts, lengths),
        logit_rows=None if all_logits else tensor_of(rows_wanted),
        tokens_per_group=tokens_per_group,
        sequence_parallel=sequence_parallel,
        wanted_per_group=wanted_per_group,
        recurrent=states.recurrent(len(lengths)) if state_layers else None,
        expanded=expanded.subset(ops, tables_of, pool.page_size) if expanded.rows else None,
        absorbed=absorbed.subset(ops, tables_of, pool.page_size) if expanded.rows and absorbed.rows else None,
    )


class Places:
    """Where a step's tokens are written, and which pages its sequences have, in each of `sets` sets of layers. `aside`
    is as of `pack`."""

    def __init__(self, pool: Pages, table_width: int, sets: int, aside: bool):
        self.pool, self.table_width, self.aside = pool, table_width, aside
        # Of each set of layers: slots (T), and block tables (S, table_width).
        self.sets: list[tuple[array[int], array[int]]] = [(array("q"), array("q")) for _ in range(sets)]
        self.unused = array("q", bytes(8 * table_width))

    def add(self, sequence: Sequence, positions: range, tables: int) -> None:
        """Tokens of a sequence, whose block table stands `tables` times."""
        size = self.pool.page_size
        for held, (slots, all_tables) in zip(sequence.held, self.sets, strict=True):
            table = held.pages(self.pool)
            for position in positions:
                slots.append(table[position // size] * size + position % size)
            for _ in range(tables):
                all_tables += table
                all_tables += self.unused[len(table) :]

    def pad(self, row: int) -> None:
        """A padding token, in row `row` of them."""
        for slots, tables in self.sets:
            # Ops want each slot only once.
            slots.append(self.pool.padding * self.pool.page_size + row % self.pool.page_size)
            tables.extend([self.pool.padding] * self.table_width)

    def tables(self) -> list[Tensor]:
        found = [tensor_of(tables).view(-1, self.table_width) for _, tables in self.sets]
        return [*found, found[0] // self.pool.stride] if self.aside else found

    def paged(self, ops: Ops, tables: ListOf[Tensor], starts: "array[int]", lengths: "array[int]") -> tuple[Paged, ...]:
        """What the layers of each set are told; `tables` are those of `tables()`."""
        size, stride = self.pool.page_size, self.pool.stride
        all_slots = [slots for slots, _ in self.sets]
        if self.aside:
            all_slots.append(array("q", [slot // size // stride * size + slot % size for slot in all_slots[0]]))
        return tuple(ops.paging(slots, of, starts, lengths, size) for slots, of in zip(all_slots, tables, strict=True))


class Picked:
    """Rows of a step's sequences, of which each has a run or none."""

    def __init__(self) -> None:
        self.rows: array[int] = array("q")
        self.sequences: array[int] = array("q")
        self.starts: array[int] = array("q", [0])
        self.lengths: array[int] = array("q")

    def add(self, sequence: int, first: int, end: int, length: int) -> None:
        """Rows first .. end - 1 of a sequence, which then has `length` cached tokens."""
        if first < end:
            self.rows.extend(range(first, end))
            self.sequences.append(sequence)
            self.starts.append(len(self.rows))
            self.lengths.append(length)

    def subset(self, ops: Ops, tables: ListOf[Tensor], page_size: int) -> Subset:
        """`tables` are the block tables of the step's sequences, for each set of layers."""
        sequences, none = tensor_of(self.sequences), array("q")
        each = (ops.paging(none, of[sequences], self.starts, self.lengths, page_size) for of in tables)
        return Subset(tensor_of(self.rows), tuple(each))


def pack_rows(
    ops: Ops,
    rows: ListOf[tuple[Sequence, int] | None],
    pool: Pages,
    tokens_per_group: tuple[int, ...],
    table_width: int,
    sets: int = 1,
    aside: bool = False,
) -> Batch:
    """The batch of one token of each of `rows`, (sequence, position), whose pages are reserved, without its ids. None
    is a padding row. `aside` is as of `pack`."""
    places = Places(pool, table_width, sets, aside)
    for index, row in enumerate(rows):
        if row:
            places.add(row[0], range(row[1], row[1] + 1), 1)
        else:
            places.pad(index)
    positions = array("q", (row[1] if row else 0 for row in rows))
    starts, lengths = array("q", range(len(rows) + 1)), array("q", (r[1] + 1 if r else PADDING_LENGTH for r in rows))
    paged = places.paged(ops, places.tables(), starts, lengths)
    ids = torch.zeros(len(rows), dtype=torch.int64)
    return Batch(ids, tensor_of(positions), paged, logit_rows=None, tokens_per_group=tokens_per_group)


class StateRows:
    """The places of the states of a step's sequences, in each of `layers` layers."""

    def __init__(self, layers: int):
        self.layers, self.starts = layers, array("q", [0])
        self.tables: list[array[int]] = [array("i") for _ in range(5)]  # those of `Recurrent`, (S, layers)

    def add(self, sequence: Sequence, end: int) -> None:
        """A sequence whose rows end before `end`."""
        self.starts.append(end)
        written, marked, mark = sequence.written, sequence.marked, sequence.mark if sequence.marked else 0
        if sequence.drafted:  # all that is written are the states after the last row that is certain
            written, marked, mark = None, sequence.written, sequence.written_at
        self._extend(sequence.states, written, mark and mark - sequence.states_at, marked, sequence.pending)

    def recurrent(self, count: int) -> Recurrent:
        """The places of `count` sequences, of which the last ones may have no rows."""
        for _ in range(count + 1 - len(self.starts)):
            self.starts.append(self.starts[-1])
            self._extend(None, None, 0, None, 0)
        found = (tensor_of(table).view(count, self.layers) for table in self.tables)
        return Recurrent(tensor_of(self.starts), *(table.T.contiguous() for table in found))

    def _extend(self, *row: States | int | None) -> None:
        for table, value in zip(self.tables, row, strict=True):
            if isinstance(value, States):
                table.extend(value.places)
            else:
                table.extend([-1 if value is None else value] * self.layers)
