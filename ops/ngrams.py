"""The meaning of rows by hashes of the last tokens, as reference.py has that of other ops."""

import torch
from torch import Tensor

from umbra.ops.interface import NgramTable


def ngram_rows(token_ids: Tensor, previous: Tensor, table: NgramTable) -> Tensor:
    size, per_size = len(table.multipliers), len(table.moduli) // (len(table.multipliers) - 1)
    ids = [token_ids]
    ended = torch.zeros_like(token_ids, dtype=torch.bool)
    for before in previous.unbind(1):
        ended = ended | (before < 0) | (before == table.end)
        ids.append(torch.where(ended, table.end, before))
    rows, mixed = [], token_ids * table.multipliers[0]
    for length in range(2, size + 1):
        mixed = mixed ^ (ids[length - 1] * table.multipliers[length - 1])
        own = slice((length - 2) * per_size, (length - 1) * per_size)
        rows.append(mixed[:, None] % table.moduli[own] + table.offsets[own])
    at, part_rows = torch.cat(rows, 1).cpu(), len(table.parts[0])
    values = torch.stack([table.parts[i // part_rows][i % part_rows] for i in at.flatten().tolist()])
    return values.view(len(token_ids), -1).float().to(token_ids.device)


def agreeing_values(keys: Tensor, queries: Tensor, values: Tensor, streams: int) -> Tensor:
    key, query = (x.float().unflatten(1, (streams, -1)) for x in (keys, queries))
    product = (key * query).sum(-1, keepdim=True) * key.shape[-1] ** -0.5
    gate = product.abs().clamp_min(1e-6).sqrt() * product.sign()
    return (gate.sigmoid() * values.float()[:, None]).flatten(1).to(values.dtype)
