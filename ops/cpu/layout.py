"""The shapes of what the CPU ops store, for planning memory: nothing here loads the native module."""

import torch
from torch import Tensor

from umbra.ops import reference
from umbra.ops.cpu.matrix import NativeExperts, NativeHeads, NativeMatrix, NativeStack, fill_table
from umbra.ops.cpu.memory import table


def cache_shape(pages: int, page_size: int, kv_heads: int, width: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of a KV cache. One head's part of a page is contiguous: keys are (width / 2, page_size, 2), values
    (page_size / 2, width, 2); with int8 the scales follow."""
    return pages, kv_heads, width + 4 * (dtype == torch.int8), page_size


def latent_shape(pages: int, page_size: int, width: int, rotary: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of a cache of latents. A page is contiguous: (page_size, columns); with int8 the scales follow."""
    return pages, width + rotary + 4 * (dtype == torch.int8), page_size


class CpuLayout:
    vector_type, paging = staticmethod(reference.vector_type), staticmethod(reference.paging)
    matrix = NativeMatrix
    stack = NativeStack
    expert_matrices = NativeExperts
    head_matrices = NativeHeads
    latent_parts, keys_in_pairs, heads_in_q8, selects = 1, False, True, True
    row_cache = staticmethod(reference.row_cache)
    latent_prolog = staticmethod(reference.latent_prolog)
    table, fill_table = staticmethod(table), staticmethod(fill_table)

    def __init__(self, dtype: torch.dtype):
        """Activations are float32, whatever `dtype`."""

    def kv_cache(
        self, pages: int, page_size: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.zeros(cache_shape(pages, page_size, kv_heads, width, dtype), dtype=dtype, device=device)

    def latent_cache(
        self, part: int, pages: int, page_size: int, width: int, rotary: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.zeros(latent_shape(pages, page_size, width, rotary, dtype), dtype=dtype, device=device)
