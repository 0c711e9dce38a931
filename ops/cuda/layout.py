"""The shapes of what the ops store on a GPU, for planning memory."""

from collections.abc import Sequence

import torch

from umbra.ops import reference
from umbra.ops.cuda.weights import FloatHeads, FloatMatrix, expert_matrices
from umbra.ops.formats import Format


class CudaLayout:
    """`dtype` is the type of activations."""

    vector_type, paging = staticmethod(reference.vector_type), staticmethod(reference.paging)
    table, fill_table = staticmethod(reference.table), staticmethod(reference.fill_table)
    rounding_norm, latent_prolog = staticmethod(reference.rounding_norm), staticmethod(reference.latent_prolog)
    kv_cache, latent_cache = staticmethod(reference.kv_cache), staticmethod(reference.latent_cache)
    expert_matrices = staticmethod(expert_matrices)
    latent_parts, keys_in_pairs, heads_in_q8, selects = 1, False, False, False

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def matrix(self, rows: int, columns: int, format: Format, device: torch.device) -> FloatMatrix:
        return FloatMatrix(rows, columns, format, self.dtype, device)

    def stack(self, parts: Sequence[tuple[int, Format]], columns: int, device: torch.device) -> FloatMatrix:
        """One matrix, of the widest of the parts' types."""
        formats = [format for _, format in parts if not format.quantised] or [parts[0][1]]
        widest = max(formats, key=lambda format: format.spec.bits)
        return FloatMatrix(sum(rows for rows, _ in parts), columns, widest, self.dtype, device)

    def head_matrices(self, count: int, rows: int, columns: int, format: Format, device: torch.device) -> FloatHeads:
        return FloatHeads(count, rows, columns, format, self.dtype, device)
