"""Dense Qwen3.5, 3.6 and 3.8: the layers of Qwen3.5-MoE with an MLP in place of each mixture of experts.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from umbra.models.hybrid import HybridForCausalLM


class Qwen3_5ForCausalLM(HybridForCausalLM):
    fused = False
