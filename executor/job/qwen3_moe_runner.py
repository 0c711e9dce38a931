"""Qwen3-MoE's runner."""

from executor.job.runner import ModelRunner
from executor.platform.base import Step
from models.build import Build
from models.qwen3_moe.model import Qwen3MoeForCausalLM


class Qwen3MoeRunner(ModelRunner):
    def build_model(self, build: Build) -> Qwen3MoeForCausalLM:
        return Qwen3MoeForCausalLM(self.config, build)

    def graph_compile(self) -> Step:
        """One static graph of the decode step for each number of sequences; prefill stays op by op."""
        if self.case.exe_mode == "eager":
            return super().graph_compile()
        return self.platform.compile(self.model.decode, self.config)
