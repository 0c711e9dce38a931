"""Packs the next tokens of sequences into one batch, without padding between prompts of different lengths."""

from collections.abc import Sequence as ListOf

import torch

from executor.kv_pages import PagePool
from executor.sequence import Sequence
from models.batch import Batch


def pack(
    sequences: ListOf[Sequence],
    pool: PagePool,
    tokens_per_group: tuple[int, ...],
    table_width: int,
    device: torch.device,
    all_logits: bool = False,
) -> Batch:
    """The batch of `sequences`, all of this rank's group, whose pages are reserved; block tables all of one width."""

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for s in sequences:
        ids += s.ids[s.cached : s.end]
        positions += range(s.cached, s.end)
        slots += pool.slots(s.pages, s.cached, s.end)
        starts.append(len(ids))
    tables = [s.pages + [0] * (table_width - len(s.pages)) for s in sequences]
    return Batch(
        token_ids=tensor(ids),
        positions=tensor(positions),
        slots=tensor(slots),
        block_tables=torch.tensor(tables, dtype=torch.int64, device=device).view(len(sequences), table_width),
        query_starts=tensor(starts),
        kv_lens=tensor([s.end for s in sequences]),
        logit_rows=None if all_logits else tensor([end - 1 for end in starts[1:]]),
        tokens_per_group=tokens_per_group,
    )
