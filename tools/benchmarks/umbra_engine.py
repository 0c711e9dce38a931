"""Umbra's engine for benchmarks: token ids to logits through the runner's own steps, with random weights, no sampling;
and what a step reads and multiplies.

Decode repeats one position: the last token of every sequence is replaced and its keys and values are overwritten, so
that any number of steps has the same context.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from umbra.base.errors import UserError
from umbra.executor.config.env import rank_env
from umbra.executor.config.load import load_case
from umbra.executor.engine.step.teacher_forcing import ForcedRun
from umbra.executor.model_runner import make_runner
from umbra.models.config import ModelConfig, with_layers
from umbra.models.layers.attention import PagedAttention, PagedCache
from umbra.models.layers.base import layers_of
from umbra.models.layers.embedding import LMHead, VocabEmbedding
from umbra.models.layers.experts import Experts
from umbra.models.layers.latent_attention import KeysAndValues, LatentAttention, PagedLatents
from umbra.models.layers.linear import MergedLinear, RowLinear
from umbra.models.layers.router import Router
from umbra.models.layers.states import RecurrentStates
from umbra.models.moe_config import MoeConfig

ROOM = 2  # tokens of room after a context
WEIGHTS = "q4", "q8", "auto"
HELP_OF_FORMAT = "of the weights, with the head in q8; auto: as the case's config.json says"
HELP_OF_REST = "quantization.rest, with --format auto"


def with_experts(config: ModelConfig, layers: int, experts: int | None = None) -> ModelConfig:
    """Returns `config` with another number of layers, all with experts if the model has any, and of experts."""
    if layers < 1:
        raise UserError(f"--layers {layers}: must be at least 1")
    if experts is not None:
        if not (isinstance(config, MoeConfig) and config.num_experts_per_tok <= experts <= config.num_experts):
            raise UserError(f"--experts {experts}: must be those of a token to those of a layer, in this family")
        config = dataclasses.replace(config, num_experts=experts)
    sparse = [layer for layer, has in enumerate(getattr(config, "sparse_layers", ())) if has]
    sparse = sparse or [*range(config.num_hidden_layers)]
    return with_layers(config, [sparse[i % len(sparse)] for i in range(layers)])


@dataclass(frozen=True)
class EngineSetup:
    case_name: str
    layers: int | None  # None: as many as the case's checkpoint
    format: str
    threads: int
    instruction_set: str
    sequences: int
    longest: int  # tokens of each sequence
    kv_dtype: str = "auto"
    world_size: int = 1
    rest: str = "none"
    checkpoint: Path | None = None  # None: random weights
    experts: int | None = None  # None: as many as the case's checkpoint


class Umbra:
    """An engine, or one rank of it."""

    def __init__(self, setup: EngineSetup):
        settings = dict(
            with_ckpt="false",
            exe_mode="graph",
            world_size=setup.world_size,
            method=setup.format,
            threads=setup.threads,
            instruction_set=setup.instruction_set,
            batch_size=setup.sequences,
            input_max_len=setup.longest,
            max_new_tokens=ROOM,
            ignore_eos="true",
            kv_dtype=setup.kv_dtype,
            rest=setup.rest,
        )
        if setup.checkpoint:
            settings |= dict(with_ckpt="true", keep_packed="false", model_path=str(setup.checkpoint.absolute()))
        case = load_case(setup.case_name, [f"{key}={value}" for key, value in settings.items()])
        self.runner = make_runner(case, Path("results"), rank_env())
        if setup.layers is not None:
            self.runner.config = with_experts(self.runner.config, setup.layers, setup.experts)
        self.config = self.runner.config
        self.runner.setup()
        self.model = self.runner.engine.model
        mixtures = sum(isinstance(layer, Experts) for layer in self.model.modules())
        if 0 < mixtures < self.config.num_hidden_layers:
            raise UserError(f"{setup.case_name}: has dense layers and others; these benchmarks know only layers alike")
        self.forced = ForcedRun(self.runner.engine)
        self.filled = False  # whether all pages hold random keys and values

    def random_prompts(self, count: int, length: int, generator: torch.Generator) -> list[list[int]]:
        """`count` different prompts; sequences with the same tokens would be routed to the same experts."""
        rows: list[list[int]] = torch.randint(self.config.vocab_size, (count, length), generator=generator).tolist()
        return rows

    def prefill(self, prompt: list[int]) -> Tensor:
        """Logits (1, vocabulary) of the last token; the cache is empty before and afterwards."""
        self.forced.close()
        (logits,) = self.forced.add([prompt], ROOM)
        self.forced.close()
        return logits

    def begin(self, contexts: list[list[int]]) -> None:
        """Cache `contexts`; from now on each `step` decodes one token behind them."""
        self.forced.close()
        for context in contexts:  # one prompt a step, so that room for activations does not grow with their number
            self.forced.add([context], ROOM)
        self.forced.extend([0] * len(contexts))

    def assume(self, contexts: list[list[int]]) -> None:
        """`begin` without computing: the contexts' keys and values are random. Measures long contexts in short time."""
        self.forced.close()
        if not self.filled:
            self._fill_caches()
        self.forced.assume(contexts, ROOM)
        self.forced.extend([0] * len(contexts))

    def step(self, tokens: list[int]) -> Tensor:
        """Logits (sequences, vocabulary), which the next step overwrites."""
        self.forced.replace(tokens)
        return self.forced.decode_in_place()

    def steps(self, tokens: list[list[int]]) -> None:
        """A step for each of `tokens`."""
        for token in tokens:
            self.step(token)

    def _fill_caches(self) -> None:
        for layer in self.model.modules():
            if isinstance(layer, PagedAttention):
                pages, kv_heads, _, page_size = layer.k_cache.shape
                for slot_mapping in torch.arange(pages * page_size).split(1 << 14):
                    k, v = torch.randn(2, len(slot_mapping), kv_heads, self.config.head_dim)
                    layer.ops.write_kv(k, v, layer.k_cache, layer.v_cache, slot_mapping)
            elif isinstance(layer, PagedLatents):
                pages, _, page_size = layer.caches[0].shape
                for slot_mapping in torch.arange(pages * page_size).split(1 << 14):
                    latents, keys = (torch.randn(len(slot_mapping), width) for width in layer.sizes)
                    layer.ops.write_latents(latents, keys, layer.caches, slot_mapping)
        # States of sequences that end leave pages with anything.
        self.filled = not any(isinstance(layer, RecurrentStates) for layer in self.model.modules())

    def capture_again(self) -> None:
        """Makes the next decode step capture a new graph."""
        self.runner.engine.decode_step = self.runner.graph_compile()


class Routed:
    """While open, records which experts the router chose in each layer.

    A replayed graph writes its ids to the captured tensors, so it is recorded too if it was captured meanwhile.
    """

    def __init__(self, model: nn.Module):
        self.layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
        self.ids: dict[nn.Module, Tensor] = {}  # (tokens, top_k) of the last step
        self.hits: list[int] = []

    def __enter__(self) -> "Routed":
        self.handles = [layer.register_forward_pre_hook(self._see) for layer in self.layers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def count(self) -> None:
        """Count the different experts of the last step."""
        self.hits += [len(ids.unique()) for ids in self.ids.values()]

    @property
    def experts(self) -> float:
        """Mean number of different experts of a layer over the counted steps; 0: the model has none."""
        return sum(self.hits) / len(self.hits) if self.hits else 0.0

    def _see(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        _, self.ids[layer] = inputs[1]  # weights and ids


def step_bytes(model: nn.Module, tokens: int, sequences: int, cached: int, experts: float) -> float:
    """Bytes that a step of `tokens` new tokens of `sequences` sequences reads when each attends to `cached` tokens.
    Those of recurrent states count twice, as they are also written: in place, so that a line is in the cache by then
    and costs no further read. Lines on their way back share memory's rate, so the roof is still that of reads."""
    total = 0.0
    for _, layer in layers_of(model):
        if isinstance(layer, Experts):
            total += experts * layer.nbytes / layer.experts
        elif isinstance(layer, VocabEmbedding):
            total += tokens * layer.nbytes * layer.hidden / layer.elements
        else:
            total += layer.nbytes
    for attention in model.modules():
        if isinstance(attention, PagedCache):
            seen = min(cached, attention.window or cached)
            total += sum(sequences * seen * cache[0].nbytes / cache.shape[-1] for cache in attention.caches)
        elif isinstance(attention, RecurrentStates):
            total += 2 * sequences * attention.elements * 4  # float32
    return total


def step_seconds(
    model: nn.Module, sequences: int, cached: int, experts: float, gbps: float, bf16_gmacs: float
) -> float:
    """The least time of a decode step of so many sequences, each with `cached` tokens: that of its reads. Attention
    over latents takes that of its multiply-adds, if it is longer."""
    left: float = step_bytes(model, sequences, sequences, cached, experts)
    compute: float = 0.0
    for layer in model.modules():
        if isinstance(layer, LatentAttention):
            (cache, *_), (width, rotary) = layer.attention.caches, layer.attention.sizes
            size = sequences * cached * cache[0].nbytes / cache.shape[-1]
            macs = sequences * cached * layer.kv_b_proj.heads * (2 * width + rotary)
            if macs / bf16_gmacs > size / gbps:
                left, compute = left - size, compute + macs
    return left / gbps / 1e9 + compute / bf16_gmacs / 1e9


def step_macs(model: nn.Module, tokens: int, logit_rows: int, top_k: int) -> float:
    """Multiply-adds with weights in a step of `tokens` tokens, of which `logit_rows` pass the last attention."""
    layers, total, rows = layers_of(model), 0.0, tokens
    *_, last = (path for path, _ in layers if path.endswith(("self_attn.o_proj", "linear_attn.out_proj")))
    for path, layer in layers:
        if isinstance(layer, Experts):
            total += rows * top_k * layer.elements / layer.experts
        elif isinstance(layer, (MergedLinear, RowLinear, Router, LMHead, KeysAndValues)):
            total += rows * layer.elements
        if path == last:
            rows = logit_rows
    return total
