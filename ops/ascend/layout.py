"""The tensors that the Ascend ops store, with their shapes: all that a memory plan needs, without a device."""

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops import reference
from umbra.ops.ascend.weights import AscendExperts, AscendHeads, AscendMatrix
from umbra.ops.formats import Format
from umbra.ops.interface import SILU_EXPERTS, ExpertKind, LatentProlog, Numbers, Paged, tensor_of

CAUSAL_MASK = 2048  # rows and columns of the mask (bool) that prefill's attention repeats
TILE = 16  # columns of a tile
HEAD_DIMS = (64, 128)  # widths of heads that caches in tiles take
LATENT_SIZES = 512, 64  # columns of latents and rotated keys that attention and its caches take


class AscendLayout:
    """`dtype` is the type of activations. With `tiled`, KV caches are in tiles of 16 columns, as
    npu_qkv_rms_norm_rope_cache writes them. With `in_planes`, 4-bit matrices are kept as the kernels of the vector
    cores read them."""

    def __init__(self, dtype: torch.dtype, tiled: bool = False, in_planes: bool = False):
        self.dtype, self.tiled, self.in_planes, self.banks = dtype, tiled, in_planes, 0
        self.flat = tiled  # whether the ops that write caches take a flat slot mapping
        self.has_caches = False  # whether a cache was made

    table, fill_table = staticmethod(reference.table), staticmethod(reference.fill_table)
    latent_parts, heads_in_q8, keys_in_pairs, selects = 2, False, True, False

    def vector_type(self, dtype: torch.dtype) -> torch.dtype:
        return dtype  # the fused norms need their weight in the type of their input

    def matrix(self, rows: int, columns: int, format: Format, device: torch.device) -> AscendMatrix:
        return AscendMatrix(rows, columns, format, self.dtype, device, self.in_planes)

    def expert_matrices(
        self, count: int, inner: int, hidden: int, format: Format, device: torch.device, kind: ExpertKind = SILU_EXPERTS
    ) -> AscendExperts:
        in_planes = self.in_planes
        experts = AscendExperts(count, inner, hidden, format, self.dtype, device, in_planes=in_planes, kind=kind)
        self.banks += 1
        experts.number = self.banks
        return experts

    def kv_cache(
        self, pages: int, page_size: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """(pages, page_size, kv_heads * width): the layout of paged attention that takes one token per sequence. Tiled:
        (pages, kv_heads * width / 16, page_size, 16). Heads of all layers are tiled, or of none."""
        tiled = self.tiled and width in HEAD_DIMS
        if self.has_caches and self.tiled and not tiled:
            raise UserError(
                f"head_dim: {width}: beside a model whose caches are in tiles, on ascend a head for drafts has one of "
                f"{', '.join(map(str, HEAD_DIMS))}"
            )
        self.flat = self.tiled = tiled
        self.has_caches = True
        columns = kv_heads * width
        shape = (columns // TILE, page_size, TILE) if self.tiled else (page_size, columns)
        return torch.zeros(pages, *shape, dtype=dtype, device=device)

    def head_matrices(self, count: int, rows: int, columns: int, format: Format, device: torch.device) -> AscendHeads:
        return AscendHeads(count, rows, columns, format, device)

    def latent_prolog(self, hidden: int, rank: int, heads: int, key: int, format: Format) -> LatentProlog | None:
        """None: plans count op by op what precedes attention, which takes more memory."""
        return None

    def latent_cache(
        self, part: int, pages: int, page_size: int, width: int, rotary: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """(pages, page_size, 1, columns): latents, then rotated keys. So the op that writes them takes a cache; with a
        view of it, a graph would copy the cache."""
        if (width, rotary) != LATENT_SIZES:
            raise UserError(
                f"kv_lora_rank: {width}, qk_rope_head_dim: {rotary}: attention on ascend takes latents of 512 and "
                "rotated keys of 64 columns"
            )
        self.flat = True
        return torch.zeros(pages, page_size, 1, (width, rotary)[part], dtype=dtype, device=device)

    def paging(
        self, slot_mapping: Numbers, block_tables: Tensor, query_starts: Numbers, kv_lens: Numbers, page_size: int
    ) -> Paged:
        """Slots (T), or (T, 2) for keys and values without tiles, each a page and a position in it: with indices into a
        flat view of such a cache, a graph would copy the cache. Lengths stay host integers, because the launch of the
        attention op takes integers."""
        flat = tensor_of(slot_mapping)
        return Paged(
            flat if self.flat else torch.stack((flat // page_size, flat % page_size), dim=-1),
            block_tables.to(torch.int32),
            tuple(query_starts),
            tuple(kv_lens),
        )
