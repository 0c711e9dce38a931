"""Packs the next tokens of sequences into one batch, without padding between prompts of different lengths."""

from array import array
from collections.abc import Sequence as ListOf

from executor.engine.pages import Pages
from executor.engine.sequence import Sequence
from models.batch import Batch
from ops.interface import Ops, tensor_of

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
) -> Batch:
    """Returns the batch of `sequences`, with its tensors on the host. All sequences belong to this rank's data-parallel
    group, and their pages are reserved.

    In a decode step each token is a row by itself, with its own block table and length, also where several are of one
    sequence: so drafted tokens are computed as they would be without drafts. All rows' keys are written before any row
    attends to them.

    For graphs of fixed sizes, and for equal shares of ranks, the batch is padded to `rows` rows, with one token
    each. Padding tokens are written to a page that no sequence holds.
    """
    ids: array[int] = array("q")
    tables: array[int] = array("q")  # (S, table_width)
    positions: array[int] = array("q")
    slots: array[int] = array("q")
    starts: array[int] = array("q", [0])
    lengths: array[int] = array("q")
    rows_wanted: array[int] = array("q")
    size, unused = pool.page_size, array("q", bytes(8 * table_width))
    for s in sequences:
        table, computed, end = _table(s, pool), s.num_computed, s.end
        ids += s.ids[computed:end]
        for position in range(computed, end):
            positions.append(position)
            slots.append(table[position // size] * size + position % size)
        for last in range(computed + 1, end + 1) if decode else (end,):
            tables += table
            tables += unused[len(table) :]
            lengths.append(last)
            starts.append(starts[-1] + 1 if decode else len(ids))
        if not all_logits:
            rows_wanted.extend(range(len(ids) - s.logit_rows, len(ids)))
    for row in range(rows - len(lengths)):
        ids.append(0)
        positions.append(0)
        slots.append(pool.padding * size + row % size)  # ops want each slot only once
        tables.extend([pool.padding] * table_width)
        lengths.append(PADDING_LENGTH)
        starts.append(len(ids))
        rows_wanted.append(len(ids) - 1)
    paged = ops.paging(slots, tensor_of(tables).view(len(lengths), table_width), starts, lengths, size)
    return Batch(
        tensor_of(ids),
        tensor_of(positions),
        paged,
        logit_rows=None if all_logits else tensor_of(rows_wanted),
        tokens_per_group=tokens_per_group,
        sequence_parallel=sequence_parallel,
        wanted_per_group=wanted_per_group,
    )


def _table(sequence: Sequence, pool: Pages) -> "array[int]":
    """The numbers of the sequence's pages."""
    table = sequence.table
    if sequence.table_version != pool.version:
        sequence.table_version = pool.version
        del table[:]
    if len(table) < len(sequence.blocks):
        table.extend([block.page for block in sequence.blocks[len(table) :]])
    return table
