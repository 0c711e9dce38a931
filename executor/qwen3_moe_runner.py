"""Qwen3-MoE's runner."""

from executor.model_runner import ModelRunner
from models.layers import Build
from models.qwen3_moe.model import Qwen3MoeForCausalLM


class Qwen3MoeRunner(ModelRunner):
    def build_model(self, build: Build) -> Qwen3MoeForCausalLM:
        return Qwen3MoeForCausalLM(self.config, build)
