"""FP8 in blocks, as many official checkpoints have it, or with larger parts of a matrix in place of a block: some have
a scale for each row.

weight float8_e4m3 (N, K), weight_scale_inv (ceil(N / 128), ceil(K / 128)); w = weight * scale of its block

compressed-tensors has the names weight and weight_scale, and scales of blocks, of rows (N, 1) or of the matrix (1).
"""

from umbra.executor.checkpoint.formats.bitpack import covering, groups_of
from umbra.executor.checkpoint.formats.patterns import inside
from umbra.executor.checkpoint.formats.scheme import FLOATS, Encoding, Fetch, Needed, Scheme, Stored
from umbra.models.hf_config import HfConfig
from umbra.ops.formats import FORMATS
from umbra.ops.formats.f8 import F8
from umbra.ops.formats.quantised import Quantised

BLOCK = 128
SHARING = {  # what shares a scale: its name in titles, its rows and columns (-1: all)
    "block": (f"in blocks of {BLOCK} x {BLOCK}", BLOCK, BLOCK),
    "channel": ("with a scale for each row", 1, -1),
    "tensor": ("with one scale", -1, -1),
}


class Fp8Matrix(Encoding):
    format, bits, zeros = FORMATS[F8.name], 8, False

    def __init__(self, scale: str = "weight_scale_inv", strategy: str = "block"):
        """`scale` is the last name of the tensor that holds the scales; `strategy`, in compressed-tensors' words, says
        what shares one."""
        self.signs = ("weight", scale)
        sharing, self.rows, self.group = SHARING[strategy]
        self.title = f"FP8 e4m3 {sharing}"

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        weight, scale = (f"{module}.{sign}" for sign in self.signs)
        tall, wide = self.rows if self.rows > 0 else rows, self.group if self.group > 0 else columns

        def read(fetch: Fetch, outputs: slice, inputs: slice) -> Quantised:
            down, in_rows = covering(outputs, tall)
            right, cut = groups_of(inputs, wide)
            stored_scales = fetch(scale).view(1, 1) if self.rows < 0 else fetch(scale, down, right)
            scales = stored_scales.float().repeat_interleave(tall, 0)[in_rows]
            return Quantised(F8, levels=fetch(weight, outputs, inputs), scales=cut(scales), zeros=None)

        blocks = (1,) if self.rows < 0 else (-(-rows // tall), -(-columns // wide))
        return Stored({weight: Needed((rows, columns), ("F8_E4M3",)), scale: Needed(blocks, FLOATS)}, read)


class Fp8(Scheme):
    def __init__(self, config: HfConfig):
        config.refuse("fmt", "e4m3", "float8_e4m3fn")
        if config.value("weight_block_size") != [BLOCK, BLOCK]:
            raise config.error("weight_block_size", f"must be [{BLOCK}, {BLOCK}]")
        self.excluded = inside(config.names("modules_to_not_convert"))
        self.encodings = (Fp8Matrix(),)
        self.title = self.encodings[0].title

    def said(self, *spellings: str) -> Encoding | None:
        """Every linear module is quantised, except the head and those that `modules_to_not_convert` names."""
        return None if "lm_head" in spellings or any(map(self.excluded, spellings)) else self.encodings[0]
