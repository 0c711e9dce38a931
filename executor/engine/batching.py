"""Packs the next tokens of sequences into one batch, without padding between prompts of different lengths."""

from collections.abc import Sequence as ListOf

import torch

from executor.engine.pages import Pages
from executor.engine.sequence import Sequence
from models.batch import Batch
from ops.interface import Ops

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
) -> Batch:
    """Returns the batch of `sequences`, with its tensors on the host. All sequences belong to this rank's data-parallel
    group, and their pages are reserved.

    For graphs of fixed sizes, and for equal shares of ranks, the batch is padded to `rows` sequences, with one token
    each. Padding tokens are written to a page that no sequence holds.
    """
    ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    starts = [0]
    rows_wanted: list[int] = []
    for s in sequences:
        ids += s.ids[s.cached : s.end]
        positions += range(s.cached, s.end)
        places += pool.places(s.blocks, s.cached, s.end)
        starts.append(len(ids))
        rows_wanted += range(len(ids) - s.logit_rows, len(ids))
    tables = [[b.page for b in s.blocks] + [0] * (table_width - len(s.blocks)) for s in sequences]
    lengths = [s.end for s in sequences]
    for row in range(rows - len(sequences)):
        ids.append(0)
        positions.append(0)
        places.append(pool.padding * pool.page_size + row % pool.page_size)  # ops want each place only once
        starts.append(len(ids))
        rows_wanted.append(len(ids) - 1)
        tables.append([pool.padding] * table_width)
        lengths.append(PADDING_LENGTH)
    paged = ops.paging(places, tables, starts, lengths, pool.page_size)
    return Batch(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        *paged,
        logit_rows=None if all_logits else torch.tensor(rows_wanted, dtype=torch.int64),
        tokens_per_group=tokens_per_group,
        sequence_parallel=sequence_parallel,
    )
