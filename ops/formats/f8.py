"""f8: floats of eight bits (e4m3) with a float32 scale for every group of a row, w = level * scale."""

from typing import TYPE_CHECKING

from umbra.ops.formats.quantised import Quantised
from umbra.ops.formats.spec import FormatSpec

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 448.0


def quantise(part: "Tensor", group: int) -> Quantised:
    """Returns `part` (m, K) rounded to e4m3 floats, each `group` columns of a row with a scale that makes the largest
    448."""
    import torch

    groups = part.float().unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / LARGEST).clamp(min=1e-30)
    return Quantised(F8, (groups / scales[..., None]).flatten(1).to(torch.float8_e4m3fn), scales, None)


F8 = FormatSpec("f8", 8, group=128, scale_type="float32", float_levels=True, int8_products=False, quantise=quantise)
