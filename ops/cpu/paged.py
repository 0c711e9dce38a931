"""Arguments of the native ops that read and write caches in pages."""

from collections.abc import Callable

import torch
from torch import Tensor

from umbra.ops.cpu.engine import TYPES, pointer, strided
from umbra.ops.interface import Paged

INT = torch.int64


def tables_of(paged: Paged) -> tuple[Tensor, Tensor, Tensor]:
    """The block tables, the starts of queries and the lengths of sequences, which the kernels read."""
    _, block_tables, query_starts, kv_lens = paged
    if not (isinstance(query_starts, Tensor) and isinstance(kv_lens, Tensor)):
        raise TypeError("lengths must be tensors, as `paging` makes them")
    return block_tables, query_starts, kv_lens


def write_tokens(
    write: Callable[..., None],
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    page_size: int,
) -> None:
    """Calls `write`, a native op that stores keys and values in slots of caches, which lie as this op says."""
    tokens, heads, width = k.shape
    dtype = k_cache.dtype
    write(
        strided(k),
        strided(v),
        pointer(k_cache, dtype),
        pointer(v_cache, dtype),
        pointer(slot_mapping, INT),
        tokens,
        heads,
        width,
        page_size,
        k.stride(0),
        v.stride(0),
        TYPES[dtype],
    )
