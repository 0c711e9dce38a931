"""w8a8: integers of eight bits with one float32 scale a row, w = (level - 128) * scale. Checkpoints in this format were
made for activations of eight bits too: a device with products of integers rounds them, with a scale for every token."""

from typing import TYPE_CHECKING

from umbra.ops.formats.quantised import Quantised
from umbra.ops.formats.spec import FormatSpec

if TYPE_CHECKING:
    from torch import Tensor


def quantise(part: "Tensor", group: int = 0) -> Quantised:
    """Returns `part` (m, K) rounded to the nearest of 255 steps, with one scale a row whatever the group."""
    import torch

    wide = part.float()
    scales = wide.abs().amax(1, keepdim=True) / 127
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 1, scales)  # all weights become zero
    return Quantised(W8A8, (wide / scales).round().to(torch.int8), scales, None)


W8A8 = FormatSpec(
    "w8a8", 8, group=128, scale_type="float32", middle=128, int8_inputs=True, quantise=quantise, method="q8"
)
