"""Umbra's engine for benchmarks: token ids to logits through the runner's own steps, with random weights, no sampling.

Decode repeats one position: the last token of every sequence is replaced and its keys and values are overwritten, so
that any number of steps has the same context.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from errors import UserError
from executor.config.env import rank_env
from executor.config.load import load_case
from executor.engine.request import Sequence
from executor.job.runners import make_runner
from models.qwen3_moe.model import Qwen3MoeForCausalLM


class Umbra:
    def __init__(
        self, case_name: str, layers: int | None, format: str, threads: int, instruction_set: str, sequences: int,
        longest: int,
    ):  # fmt: skip
        """An engine with room for `sequences` of `longest` tokens; `layers` None: as many as the case's checkpoint."""
        settings = dict(
            with_ckpt="false", exe_mode="graph", world_size=1, method=format, threads=threads,
            instruction_set=instruction_set, batch_size=sequences, input_max_len=longest, max_new_tokens=2,
            ignore_eos="true",
        )  # fmt: skip
        case = load_case(case_name, [f"{key}={value}" for key, value in settings.items()])
        self.runner = make_runner(case, Path("results"), rank_env())
        config = self.runner.config
        if not all(config.sparse_layers):
            raise UserError(f"{case_name}: has dense layers; these benchmarks know only experts in every layer")
        layers = config.num_hidden_layers if layers is None else layers
        if layers < 1:
            raise UserError(f"--layers {layers}: must be at least 1")
        self.config = self.runner.config = dataclasses.replace(
            config, num_hidden_layers=layers, sparse_layers=(True,) * layers
        )
        self.runner.setup()
        if not isinstance(self.runner.model, Qwen3MoeForCausalLM):
            raise UserError(f"{case_name}: these benchmarks know only qwen3_moe")
        self.model = self.runner.model
        self.running: list[Sequence] = []

    def random_prompts(self, count: int, length: int, generator: torch.Generator) -> list[list[int]]:
        """`count` different prompts; sequences with the same tokens would be routed to the same experts."""
        rows: list[list[int]] = torch.randint(self.config.vocab_size, (count, length), generator=generator).tolist()
        return rows

    def prefill(self, prompt: list[int]) -> Tensor:
        """Logits (1, vocabulary) of the last token; the cache is empty before and afterwards."""
        self._retire()
        logits = self._admit(prompt)
        self._retire()
        return logits

    def begin(self, contexts: list[list[int]]) -> None:
        """Cache `contexts`; from now on each `step` decodes one token behind them."""
        self._retire()
        for context in contexts:
            self._admit(context)
        self.running = list(self.runner.scheduler.running)
        self.runner.append_tokens(self.running, [0] * len(contexts))

    def step(self, tokens: list[int]) -> Tensor:
        """(sequences, vocabulary), overwritten by the next step."""
        for sequence, token in zip(self.running, tokens, strict=True):
            sequence.ids[-1] = token
        batch = self.runner.model_input_prepare(self.running, is_prefill=False)
        return self.runner.model_inference(batch, is_prefill=False)

    def _admit(self, prompt: list[int]) -> Tensor:
        """One prompt a step, so that room for activations does not grow with their number."""
        self.runner.scheduler.add(self.runner.new_sequence(0, "", prompt))
        ((_, logits),) = self.runner.prefill_steps(self.runner.scheduler.admit())
        return logits

    def _retire(self) -> None:
        for sequence in self.runner.scheduler.running:
            sequence.finish_reason = "length"
        self.runner.scheduler.retire()
