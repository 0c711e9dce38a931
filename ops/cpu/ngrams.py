"""Rows by hashes of the last tokens, computed by csrc/kernels/ngrams.cpp."""

import torch
from torch import Tensor

from umbra.ops.cpu.engine import TYPES, native, pointer
from umbra.ops.interface import NgramTable

INT = torch.int64


def ngram_rows(token_ids: Tensor, previous: Tensor, table: NgramTable) -> Tensor:
    tokens, heads, part = len(token_ids), len(table.moduli), table.parts[0]
    out = torch.empty(tokens, heads * part.shape[1])
    native.ngram_rows(
        pointer(token_ids, INT),
        pointer(previous, INT),
        pointer(table.multipliers, INT),
        pointer(table.moduli, INT),
        pointer(table.offsets, INT),
        pointer(table.addresses, INT),
        pointer(out),
        tokens,
        len(table.multipliers),
        heads,
        part.shape[1],
        len(part),
        table.end,
        TYPES[part.dtype],
    )
    return out


def agreeing_values(keys: Tensor, queries: Tensor, values: Tensor, streams: int) -> Tensor:
    tokens, hidden = values.shape
    out = torch.empty(keys.shape)
    native.agreeing_values(pointer(keys), pointer(queries), pointer(values), pointer(out), tokens, hidden, streams)
    return out
