"""FP8 in blocks, the format of DeepSeek's and Qwen's FP8 checkpoints.

weight float8_e4m3 (N, K), weight_scale_inv (ceil(N / 128), ceil(K / 128)); w = weight * scale of its block
"""

import torch
from torch import Tensor

from executor.checkpoint.formats.bitpack import covering
from executor.checkpoint.formats.scheme import FLOATS, Fetch, Needed, Scheme, Stored
from models.hf_config import HfConfig

BLOCK = 128


class Fp8(Scheme):
    title, format = f"FP8 e4m3 in blocks of {BLOCK} x {BLOCK}", None
    bits, group, zeros = 8, BLOCK, False

    def __init__(self, config: HfConfig):
        config.refuse("fmt", "e4m3")
        if config.value("weight_block_size") != [BLOCK, BLOCK]:
            raise config.error("weight_block_size", f"must be [{BLOCK}, {BLOCK}]")
        self.excluded = config.names("modules_to_not_convert")

    def quantised(self, module: str) -> bool:
        """Every linear module except the head and those inside a module that `modules_to_not_convert` names."""
        inside = f".{module}."
        return module != "lm_head" and not any(f".{name.strip('.')}." in inside for name in self.excluded)

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        weight, scale = f"{module}.weight", f"{module}.weight_scale_inv"

        def read(fetch: Fetch, outputs: slice, inputs: slice) -> Tensor:
            (down, in_rows), (right, in_columns) = covering(outputs, BLOCK), covering(inputs, BLOCK)
            scales = fetch(scale, down, right).float()
            wide = scales.repeat_interleave(BLOCK, 0)[in_rows].repeat_interleave(BLOCK, 1)[:, in_columns]
            return fetch(weight, outputs, inputs).to(torch.float32) * wide

        blocks = -(-rows // BLOCK), -(-columns // BLOCK)
        return Stored({weight: Needed((rows, columns), ("F8_E4M3",)), scale: Needed(blocks, FLOATS)}, read)
