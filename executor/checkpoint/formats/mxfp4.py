"""MXFP4 of the experts, all of them in one tensor.

_blocks uint8 (E, N, K / 32, 16), each byte two codes of e2m1 floats, the first in the lower half; _scales uint8
(E, N, K / 32), the e8m0 scale of each block; w = value * 2^(scale - 127)
"""

import torch

from umbra.base.errors import UserError
from umbra.executor.checkpoint.formats.scheme import Encoding, Fetch, Needed, Scheme, Stored, check_sizes
from umbra.models.hf_config import HfConfig
from umbra.ops.formats import FORMATS
from umbra.ops.formats.mxfp4 import MXFP4
from umbra.ops.formats.quantised import Quantised
from umbra.ops.words import Words

GROUP = MXFP4.group


class Mxfp4(Scheme, Encoding):
    title, format = f"MXFP4 in blocks of {GROUP}", FORMATS[MXFP4.name]
    bits, group, zeros, signs = 4, GROUP, False, ("blocks", "scales")
    only_experts = True

    def __init__(self, config: HfConfig):
        self.encodings = (self,)

    def said(self, *spellings: str) -> Encoding | None:
        """The tensors of all experts are quantised, and nothing else; `modules_to_not_convert` names the others."""
        return self if ".experts." in spellings[0] else None

    def tensors(self, module: str) -> tuple[str, ...]:
        return tuple(f"{module}_{sign}" for sign in self.signs)

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        raise UserError(f"{module}: MXFP4 is read only where one tensor has all experts")

    def stacked(self, module: str, experts: int, rows: int, columns: int) -> Stored:
        check_sizes(module, ("columns", columns, "a block", GROUP))
        blocks, scales = self.tensors(module)
        count = columns // GROUP

        def read(fetch: Fetch, one: slice, outputs: slice, inputs: slice) -> Quantised:
            part = slice(inputs.start // GROUP, inputs.stop // GROUP)
            words = fetch(blocks, one, outputs, part)[0].flatten(1).view(torch.int32)
            return Quantised(
                MXFP4, Words(words, 4), fetch(scales, one, outputs, part)[0].view(torch.float8_e8m0fnu), None
            )

        shape = experts, rows, count
        return Stored({blocks: Needed((*shape, GROUP // 2), ("U8",)), scales: Needed(shape, ("U8",))}, read)
