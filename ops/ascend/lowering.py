"""Teaches torchair lowerings so that graphs have no copies which eager mode does not make; the module is imported for
its effect."""

from typing import Any

import torch
from torchair._acl_concrete_graph import graph_pass
from torchair._ge_concrete_graph import ge_apis as ge
from torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
from torchair._ge_concrete_graph.ge_converter import custom  # noqa: F401 (torchair's must be registered before ours)

# The variants that return what they write, and the positions of the tensors that are written. Without this, captured
# graphs copy whole KV caches before and after each call.
if hasattr(torch.ops.npu, "npu_qkv_rms_norm_rope_cache"):  # torchair of torch_npu 2.8 has no such list
    registered = graph_pass.register_inplaceable_npu_op
    registered("npu_qkv_rms_norm_rope_cache_functional", "npu_qkv_rms_norm_rope_cache", [6, 7, 8])
    registered("npu_scatter_pa_kv_cache_functional", "npu_scatter_pa_kv_cache", [2, 3])

BSND = 1
ROTARY: Any = torch.ops.npu.npu_apply_rotary_pos_emb.default


@register_fx_node_ge_converter(ROTARY)  # type: ignore[untyped-decorator]
def rotary(
    query: Any, key: Any, cos: Any, sin: Any, layout: str = "BSND", rotary_mode: str = "half", meta_outputs: Any = None
) -> Any:
    """Makes a node that rotates in place. torchair's converter copies q and k first, which takes two kernels in each
    layer. AscendOps.rope does not need the copies, and captured graphs and eager mode do not make them either.
    Arguments have defaults because FX drops arguments that equal their defaults."""
    if layout != "BSND":
        raise NotImplementedError(f"layout {layout}: only BSND is lowered here")
    return ge.ApplyRotaryPosEmb(query, key, cos, sin, layout=BSND, rotary_mode=rotary_mode)


@register_fx_node_ge_converter(torch.ops.aten.softplus.default)  # type: ignore[untyped-decorator]
def softplus(x: Any, beta: Any = 1, threshold: Any = 20, meta_outputs: Any = None) -> Any:
    """torchair has none."""
    if (beta, threshold) != (1, 20):
        raise NotImplementedError(f"beta {beta}, threshold {threshold}: only the usual ones are lowered here")
    return ge.Add(ge.Relu(x), ge.Log1p(ge.Exp(ge.Neg(ge.Abs(x)))))
