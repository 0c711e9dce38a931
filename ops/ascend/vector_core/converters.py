"""Makes the ops of `schemas.py` nodes of a GE graph; imported for its effect. Captured graphs do not need this.

fused_moe_slots_w4a16 is not among them: experts on the CPU are refused in GE graphs (ops/ascend/shadow.py). Nor is
unpack_tiles_w4a16: in a graph a product follows its unpack_w4a16, whose result is ND.
"""

from typing import Any

import torch
from torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
from torchair.ge import attr, custom_op

from umbra.ops.ascend.vector_core import schemas  # noqa: F401 (declares them)


@register_fx_node_ge_converter(torch.ops.umbra.fused_moe_w4a16.default)  # type: ignore[untyped-decorator]
def fused_moe_w4a16(
    x: Any,
    w13: Any,
    s13: Any,
    z13: Any,
    w2: Any,
    s2: Any,
    z2: Any,
    ids: Any,
    weights: Any,
    group: Any,
    group2: Any,
    float_sums: Any = False,
    meta_outputs: Any = None,
) -> Any:
    inputs = dict(x=x, w13=w13, s13=s13, z13=z13, w2=w2, s2=s2, z2=z2, ids=ids, weights=weights)
    attrs = dict(group=attr.Int(group), group2=attr.Int(group2), float_sums=attr.Bool(float_sums))
    return custom_op("UmbraFusedMoeW4a16", inputs=inputs, attrs=attrs, outputs=["y"])


@register_fx_node_ge_converter(torch.ops.umbra.fused_moe_scores_w4a16.default)  # type: ignore[untyped-decorator]
def fused_moe_scores_w4a16(
    x: Any,
    w13: Any,
    s13: Any,
    z13: Any,
    w2: Any,
    s2: Any,
    z2: Any,
    scores: Any,
    bias: Any,
    top_k: Any,
    sigmoid: Any,
    first_expert: Any,
    group: Any,
    group2: Any,
    float_sums: Any = False,
    meta_outputs: Any = None,
) -> Any:
    inputs = dict(x=x, w13=w13, s13=s13, z13=z13, w2=w2, s2=s2, z2=z2, scores=scores, bias=bias)
    attrs = dict(
        top_k=attr.Int(top_k),
        sigmoid=attr.Bool(sigmoid),
        first_expert=attr.Int(first_expert),
        group=attr.Int(group),
        group2=attr.Int(group2),
        float_sums=attr.Bool(float_sums),
    )
    return custom_op("UmbraFusedMoeScoresW4a16", inputs=inputs, attrs=attrs, outputs=["y"])


@register_fx_node_ge_converter(torch.ops.umbra.gemv_w4a16.default)  # type: ignore[untyped-decorator]
def gemv_w4a16(
    x: Any, w: Any, scales: Any, zeros: Any, group: Any, float_sums: Any = False, meta_outputs: Any = None
) -> Any:
    inputs = dict(x=x, w=w, scales=scales, zeros=zeros)
    attrs = dict(group=attr.Int(group), float_sums=attr.Bool(float_sums))
    return custom_op("UmbraGemvW4a16", inputs=inputs, attrs=attrs, outputs=["y"])


@register_fx_node_ge_converter(torch.ops.umbra.unpack_w4a16.default)  # type: ignore[untyped-decorator]
def unpack_w4a16(
    w: Any, scales: Any, zeros: Any, group: Any, ordered: Any, pairs: Any, meta_outputs: Any = None
) -> Any:
    attrs = dict(group=attr.Int(group), ordered=attr.Bool(ordered), pairs=attr.Bool(pairs), tiles=attr.Bool(False))
    return custom_op("UmbraUnpackW4a16", inputs=dict(w=w, scales=scales, zeros=zeros), attrs=attrs, outputs=["y"])
