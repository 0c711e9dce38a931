"""Packs the next tokens of sequences into one batch, without padding between prompts of different lengths."""

from array import array
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.executor.engine.memory.pages import Pages, States
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.models.batch import Batch, Subset
from umbra.ops.interface import Ops, Paged, Recurrent, tensor_of

PADDING_LENGTH = 2  # not 0 or 1, which compilers treat as constants


@dataclass(frozen=True)
class StepShape:
    """The part of a batch that is decided before its sequences are packed."""

    tokens_per_group: tuple[int, ...]  # of each data-parallel group, padding included
    # In a decode step each token is a row by itself, with its own block table and length, also where several are of one
    # sequence: so drafted tokens are computed as they would be without drafts. All rows' keys are written before any
    # row attends to them.
    decode: bool = False
    all_logits: bool = False  # whether the logits of all tokens are wanted
    rows: int = 0  # that the batch is padded to, for graphs of fixed sizes and for equal shares of ranks
    sequence_parallel: bool = False
    wanted_per_group: tuple[int, ...] | None = None  # see `Batch`
    aside: bool = False  # whether the caches that lie aside are used


@dataclass(frozen=True)
class Packer:
    """Packs sequences of this rank's data-parallel group, whose pages lie in `pool`, for each set of layers, of whose
    caches a page has so many pages as `parts` says; so do their states, in `state_layers` layers. `table_width` is the
    number of pages of the longest sequence."""

    ops: Ops
    pool: Pages
    table_width: int
    parts: tuple[int, ...] = (1,)
    state_layers: int = 0
    previous: int = 0  # tokens before each that `Batch.previous` has

    def pack(self, sequences: ListOf[Sequence], shape: StepShape) -> Batch:
        """Returns the batch of the next tokens of `sequences`, whose pages and states are reserved, with its tensors on
        the host. Padding rows have one token each, which is written to a page that no sequence holds."""
        rows = PackedRows(self, shape)
        for sequence in sequences:
            rows.add(sequence)
        for number in range(shape.rows - len(rows.lengths)):
            rows.pad(number)
        return rows.batch()

    def pack_positions(
        self, rows: ListOf[tuple[Sequence, int] | None], tokens_per_group: tuple[int, ...], aside: bool
    ) -> Batch:
        """Returns the batch of one token of each of `rows`, (sequence, position), whose pages are reserved, without its
        ids. None is a padding row."""
        tables = PageTables(self.pool, self.table_width, self.parts, aside)
        for number, row in enumerate(rows):
            if row:
                tables.add(row[0], range(row[1], row[1] + 1), 1)
            else:
                tables.pad(number)
        positions = array("q", (row[1] if row else 0 for row in rows))
        lengths = array("q", (row[1] + 1 if row else PADDING_LENGTH for row in rows))
        paged = tables.paged(self.ops, tables.tensors(), array("q", range(len(rows) + 1)), lengths)
        ids = torch.zeros(len(rows), dtype=torch.int64)
        return Batch(ids, tensor_of(positions), paged, logit_rows=None, tokens_per_group=tokens_per_group)


class PackedRows:
    """The rows of one batch while it is packed."""

    def __init__(self, packer: Packer, shape: StepShape):
        self.packer, self.shape = packer, shape
        self.ids: array[int] = array("q")
        self.positions: array[int] = array("q")
        self.starts: array[int] = array("q", [0])
        self.lengths: array[int] = array("q")
        self.wanted: array[int] = array("q")  # rows whose logits are wanted, unless all are
        self.tables = PageTables(packer.pool, packer.table_width, packer.parts, shape.aside)
        self.states = StateRows(packer.state_layers)
        self.expanded, self.absorbed = SubsetRows(), SubsetRows()
        self.previous: list[array[int]] = [array("q") for _ in range(packer.previous)]

    def add(self, sequence: Sequence) -> None:
        """Adds the next tokens of a sequence."""
        first, computed, end, decode = len(self.ids), sequence.num_computed, sequence.end, self.shape.decode
        self.ids += sequence.ids[computed:end]
        self.positions.extend(range(computed, end))
        for back, ids in enumerate(self.previous, 1):
            ids.extend([-1] * max(0, min(back, end) - computed))
            ids += sequence.ids[max(0, computed - back) : max(0, end - back)]
        lengths = range(computed + 1, end + 1) if decode else (end,)
        self.tables.add(sequence, range(computed, end), len(lengths))
        for length in lengths:
            self.lengths.append(length)
            self.starts.append(self.starts[-1] + 1 if decode else len(self.ids))
        if not decode:
            expanded = max(0, min(sequence.expanded, end) - computed)  # the first ones
            self.expanded.add(len(self.lengths) - 1, first, first + expanded, computed + expanded)
            self.absorbed.add(len(self.lengths) - 1, first + expanded, len(self.ids), end)
        if not self.shape.all_logits:
            self.wanted.extend(range(len(self.ids) - sequence.logit_rows, len(self.ids)))
        if self.packer.state_layers:
            self.states.add(sequence, len(self.ids))

    def pad(self, number: int) -> None:
        """Adds a padding row, the one of this number."""
        self.ids.append(0)
        self.positions.append(0)
        for ids in self.previous:
            ids.append(-1)
        self.tables.pad(number)
        self.lengths.append(PADDING_LENGTH)
        self.starts.append(len(self.ids))
        self.wanted.append(len(self.ids) - 1)
        self.absorbed.add(len(self.lengths) - 1, len(self.ids) - 1, len(self.ids), PADDING_LENGTH)

    def batch(self) -> Batch:
        ops, page_size, shape, block_tables = (
            self.packer.ops,
            self.packer.pool.page_size,
            self.shape,
            self.tables.tensors(),
        )
        mixed = bool(self.expanded.rows and self.absorbed.rows)
        return Batch(
            tensor_of(self.ids),
            tensor_of(self.positions),
            self.tables.paged(ops, block_tables, self.starts, self.lengths),
            logit_rows=None if shape.all_logits else tensor_of(self.wanted),
            tokens_per_group=shape.tokens_per_group,
            sequence_parallel=shape.sequence_parallel,
            wanted_per_group=shape.wanted_per_group,
            recurrent=self.states.recurrent(len(self.lengths)) if self.packer.state_layers else None,
            previous=torch.stack([tensor_of(ids) for ids in self.previous], 1) if self.previous else None,
            expanded=self.expanded.subset(ops, block_tables, page_size) if self.expanded.rows else None,
            absorbed=self.absorbed.subset(ops, block_tables, page_size) if mixed else None,
        )


class PageTables:
    """The slot mapping of a step's tokens, which says where they are written, and the block tables of its rows, in each
    set of layers, of whose caches a page has so many pages as `parts` says. With `aside` one more set has the pages of
    caches that lie aside: those of the first set, numbered without gaps."""

    def __init__(self, pool: Pages, table_width: int, parts: tuple[int, ...], aside: bool):
        self.pool, self.table_width, self.parts, self.aside = pool, table_width, parts, aside
        # Of each set of layers: the slot mapping (T), and block tables (S, table_width), both by numbers of the pool.
        self.sets: list[tuple[array[int], array[int]]] = [(array("q"), array("q")) for _ in parts]
        self.unused = array("q", bytes(8 * table_width))

    def add(self, sequence: Sequence, positions: range, rows: int) -> None:
        """Adds tokens of a sequence, which take `rows` rows."""
        size = self.pool.page_size
        for held, (slot_mapping, block_tables) in zip(sequence.held, self.sets, strict=True):
            table = held.pages(self.pool)
            for position in positions:
                slot_mapping.append(table[position // size] * size + position % size)
            for _ in range(rows):
                block_tables += table
                block_tables += self.unused[len(table) :]

    def pad(self, number: int) -> None:
        """Adds a padding token, the one of this number."""
        for slot_mapping, block_tables in self.sets:
            # Ops want each entry only once.
            slot_mapping.append(self.pool.padding * self.pool.page_size + number % self.pool.page_size)
            block_tables.extend([self.pool.padding] * self.table_width)

    def tensors(self) -> list[Tensor]:
        """Returns the block tables of each set, (S, table_width)."""
        tables = [tensor_of(block_tables).view(-1, self.table_width) for _, block_tables in self.sets]
        own = [table * parts if parts > 1 else table for table, parts in zip(tables, self.parts, strict=True)]
        return [*own, tables[0] // self.pool.stride] if self.aside else own

    def paged(
        self, ops: Ops, block_tables: ListOf[Tensor], starts: "array[int]", lengths: "array[int]"
    ) -> tuple[Paged, ...]:
        """Returns the metadata of each set, whose block tables are those of `tensors()`."""
        size, stride = self.pool.page_size, self.pool.stride
        mappings = [
            array("q", [at // size * parts * size + at % size for at in slots]) if parts > 1 else slots
            for (slots, _), parts in zip(self.sets, self.parts, strict=True)
        ]
        if self.aside:
            mappings.append(array("q", [at // size // stride * size + at % size for at in self.sets[0][0]]))
        return tuple(
            ops.paging(slot_mapping, table, starts, lengths, size)
            for slot_mapping, table in zip(mappings, block_tables, strict=True)
        )


class SubsetRows:
    """Some of a step's rows: of each sequence one run of them, or none."""

    def __init__(self) -> None:
        self.rows: array[int] = array("q")
        self.sequences: array[int] = array("q")
        self.starts: array[int] = array("q", [0])
        self.lengths: array[int] = array("q")

    def add(self, sequence: int, first: int, end: int, length: int) -> None:
        """Adds rows first .. end - 1 of a sequence, which then has `length` cached tokens."""
        if first < end:
            self.rows.extend(range(first, end))
            self.sequences.append(sequence)
            self.starts.append(len(self.rows))
            self.lengths.append(length)

    def subset(self, ops: Ops, block_tables: ListOf[Tensor], page_size: int) -> Subset:
        """Returns the rows; `block_tables` are those of all sequences of the step, for each set of layers."""
        sequences, no_tokens = tensor_of(self.sequences), array("q")
        paged = (
            ops.paging(no_tokens, table[sequences], self.starts, self.lengths, page_size) for table in block_tables
        )
        return Subset(tensor_of(self.rows), tuple(paged))


class StateRows:
    """The places of the states of a step's sequences, in each of `layers` layers."""

    def __init__(self, layers: int):
        self.layers, self.starts = layers, array("q", [0])
        self.tables: list[array[int]] = [array("i") for _ in range(5)]  # those of `Recurrent`, (S, layers)

    def add(self, sequence: Sequence, end: int) -> None:
        """Adds a sequence whose rows end before `end`."""
        self.starts.append(end)
        own = sequence.recurrent
        written, marked, mark = own.written, own.marked, own.mark if own.marked else 0
        if sequence.drafted:  # all that is written are the states after the last row that is certain
            written, marked, mark = None, own.written, own.written_at
        self._extend(own.states, written, mark and mark - own.at, marked, sequence.pending)

    def recurrent(self, count: int) -> Recurrent:
        """Returns the places of `count` sequences, of which the last ones may have no rows."""
        for _ in range(count + 1 - len(self.starts)):
            self.starts.append(self.starts[-1])
            self._extend(None, None, 0, None, 0)
        tables = (tensor_of(table).view(count, self.layers) for table in self.tables)
        return Recurrent(tensor_of(self.starts), *(table.T.contiguous() for table in tables))

    def _extend(self, *row: States | int | None) -> None:
        for table, value in zip(self.tables, row, strict=True):
            if isinstance(value, States):
                table.extend(value.places)
            else:
                table.extend([-1 if value is None else value] * self.layers)
