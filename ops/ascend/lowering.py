"""Converters that replace torchair's own where those add a kernel; imported for its effect."""

from typing import Any

import torch
from torchair._ge_concrete_graph import ge_apis as ge
from torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
from torchair._ge_concrete_graph.ge_converter import custom  # noqa: F401 (torchair's own, or it would come later and win)

BSND = 1
ROTARY: Any = torch.ops.npu.npu_apply_rotary_pos_emb.default
TORCHAIRS_ROTARY = ROTARY._ge_converter


@register_fx_node_ge_converter(ROTARY)  # type: ignore[untyped-decorator]
def rotary(
    query: Any, key: Any, cos: Any, sin: Any, layout: str = "BSND", rotary_mode: str = "half", meta_outputs: Any = None
) -> Any:
    """The node rotates in place. torchair copies q and k first, two kernels a layer that AscendOps.rope does not need;
    captured graphs and eager mode do not copy either. FX drops arguments that equal their defaults."""
    if layout != "BSND":
        raise NotImplementedError(f"layout {layout}: only BSND is lowered here")
    return ge.ApplyRotaryPosEmb(query, key, cos, sin, layout=BSND, rotary_mode=rotary_mode)
