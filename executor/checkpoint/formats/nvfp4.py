"""NVFP4: floats of four bits (e2m1) with an e4m3 scale for each 16 columns, and a float32 for a whole matrix.

modelopt            weight uint8 (N, K / 2), each byte two codes, the first in the lower half; weight_scale e4m3
                    (N, K / 16); weight_scale_2 float32: w = value * weight_scale * weight_scale_2
compressed-tensors  weight_packed, weight_scale, weight_global_scale: w = value * weight_scale / weight_global_scale
"""

import torch
from torch import Tensor

from umbra.executor.checkpoint.formats.scheme import FLOATS, Encoding, Fetch, Needed, Stored, check_sizes
from umbra.ops.formats import FORMATS
from umbra.ops.formats.nvfp4 import NVFP4
from umbra.ops.formats.quantised import Nested
from umbra.ops.words import Words

GROUP = 16


class Nvfp4Matrix(Encoding):
    title, format, bits, group, zeros = f"NVFP4 in groups of {GROUP}", FORMATS[NVFP4.name], 4, GROUP, False

    def __init__(self, divided: bool):
        """`divided`: weights are divided by the float of the matrix, and names are compressed-tensors'."""
        self.divided = divided
        packed, whole = ("weight_packed", "weight_global_scale") if divided else ("weight", "weight_scale_2")
        self.signs = (packed, "weight_scale", whole)

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        check_sizes(module, ("columns", columns, "a group", GROUP))
        weight, scale, whole = self.tensors(module)

        def factor(fetch: Fetch) -> Tensor:
            stored = fetch(whole).float()
            return 1 / stored if self.divided else stored

        def read(fetch: Fetch, outputs: slice, inputs: slice) -> Nested:
            words = fetch(weight, outputs, slice(inputs.start // 2, inputs.stop // 2)).view(torch.int32)
            scales = fetch(scale, outputs, slice(inputs.start // GROUP, inputs.stop // GROUP))
            return Nested(NVFP4, Words(words, 4), scales, None, factor(fetch).view(1, 1).expand(len(words), 1))

        return Stored(
            {
                weight: Needed((rows, columns // 2), ("U8",)),
                scale: Needed((rows, columns // GROUP), ("F8_E4M3",)),
                whole: Needed((1,), FLOATS),
            },
            read,
        )
