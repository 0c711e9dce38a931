"""What the Ascend ops keep, and in which shapes: all that a memory plan needs, without a device."""

import torch
from torch import Tensor

from ops.ascend.weights import AscendExperts, AscendMatrix
from ops.format import Format
from ops.interface import Lengths

CAUSAL_MASK = 2048  # rows and columns of bool, which prefill's attention repeats
MOST_PAGE = 512  # tokens; the attention op's own limit


class AscendLayout:
    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype  # of activations

    def vector_type(self, dtype: torch.dtype) -> torch.dtype:
        return dtype  # the fused norms want their weight in the type of their input

    def matrix(self, rows: int, columns: int, format: Format, device: torch.device) -> AscendMatrix:
        return AscendMatrix(rows, columns, format, self.dtype, device)

    def expert_matrices(
        self, count: int, inner: int, hidden: int, format: Format, device: torch.device
    ) -> AscendExperts:
        return AscendExperts(count, inner, hidden, format, self.dtype, device)

    def kv_cache(
        self, pages: int, page_size: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """(pages, page_size, kv_heads * width): the layout of paged attention that takes one token per sequence."""
        return torch.zeros(pages, page_size, kv_heads * width, dtype=dtype, device=device)

    def paging(
        self,
        places: list[int],
        block_tables: list[list[int]],
        query_starts: list[int],
        kv_lens: list[int],
        page_size: int,
    ) -> tuple[Tensor, Tensor, Lengths, Lengths]:
        """Slots (T, 2): page and place in it, so that a cache is written without a flat view of it, for which a graph
        would copy it. Lengths stay host integers: the attention op's launch takes them, no tensor need be read back."""
        pairs = [divmod(place, page_size) for place in places]
        return (
            torch.tensor(pairs, dtype=torch.int64).view(-1, 2),
            torch.tensor(block_tables, dtype=torch.int32).view(len(block_tables), -1 if block_tables else 0),
            tuple(query_starts),
            tuple(kv_lens),
        )
