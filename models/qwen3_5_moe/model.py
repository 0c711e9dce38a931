"""Qwen3.5-MoE and Qwen3.6-MoE: the layers of Qwen3-Next, whose projections of linear attention have other names. Of a
model that sees pictures only the part that reads text is used, whose rotary embedding of three axes is the plain one.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from umbra.models.hybrid import HybridForCausalLM


class Qwen3_5MoeForCausalLM(HybridForCausalLM):
    fused = False
