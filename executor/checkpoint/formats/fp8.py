"""FP8 in blocks, the format of DeepSeek's, Qwen's and MiniMax's own checkpoints.

weight float8_e4m3 (N, K), weight_scale_inv (ceil(N / 128), ceil(K / 128)); w = weight * scale of its block

compressed-tensors writes the same under the names weight and weight_scale.
"""

from executor.checkpoint.formats.bitpack import covering, groups_of
from executor.checkpoint.formats.patterns import inside
from executor.checkpoint.formats.scheme import FLOATS, Encoding, Fetch, Needed, Scheme, Stored
from models.hf_config import HfConfig
from ops.format import F8, Quantised

BLOCK = 128


class Fp8Blocks(Encoding):
    title, format = f"FP8 e4m3 in blocks of {BLOCK} x {BLOCK}", F8
    bits, group, zeros = 8, BLOCK, False

    def __init__(self, scale: str = "weight_scale_inv"):
        """`scale` is the last name of the tensor that holds the scales."""
        self.signs = ("weight", scale)

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        weight, scale = (f"{module}.{sign}" for sign in self.signs)

        def read(fetch: Fetch, outputs: slice, inputs: slice) -> Quantised:
            down, in_rows = covering(outputs, BLOCK)
            right, cut = groups_of(inputs, BLOCK)
            scales = fetch(scale, down, right).float().repeat_interleave(BLOCK, 0)[in_rows]
            return Quantised(bits=8, levels=fetch(weight, outputs, inputs), scales=cut(scales), zeros=None)

        blocks = -(-rows // BLOCK), -(-columns // BLOCK)
        return Stored({weight: Needed((rows, columns), ("F8_E4M3",)), scale: Needed(blocks, FLOATS)}, read)


class Fp8(Scheme):
    title = Fp8Blocks.title

    def __init__(self, config: HfConfig):
        config.refuse("fmt", "e4m3", "float8_e4m3fn")
        if config.value("weight_block_size") != [BLOCK, BLOCK]:
            raise config.error("weight_block_size", f"must be [{BLOCK}, {BLOCK}]")
        self.excluded = inside(config.names("modules_to_not_convert"))
        self.encodings = (Fp8Blocks(),)

    def said(self, module: str) -> Encoding | None:
        """Every linear module is quantised, except the head and those that `modules_to_not_convert` names."""
        return None if module == "lm_head" or self.excluded(module) else self.encodings[0]
