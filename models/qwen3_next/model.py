"""Qwen3-Next, also Qwen3-Coder-Next: three layers of gated DeltaNet (arXiv 2412.06464) for one of grouped-query
attention, whose result a sigmoid gates and of whose heads a quarter rotates; softmax-routed mixtures of experts beside
a shared expert that a sigmoid gates.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from umbra.models.hybrid import HybridForCausalLM


class Qwen3NextForCausalLM(HybridForCausalLM):
    fused = True
