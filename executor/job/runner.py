"""Runs one rank of one case: device, model, requests, the loop (prepare, infer, process, stop), and its measurements.

A model's own runner says how its model is made and, where it must, how its decode step becomes a graph.
"""

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from executor.checkpoint.formats.detect import read_scheme
from executor.checkpoint.load import load_checkpoint
from executor.checkpoint.packed import PackedCache
from executor.checkpoint.random import random_weights
from executor.checkpoint.tokenizer import open_tokenizer, stop_ids
from executor.config.case import Case
from executor.config.env import RankEnv
from executor.config.load import load_model_config, model_folder
from executor.config.platforms import PLATFORMS
from executor.engine.batching import pack
from executor.engine.building import bind_caches, build_of, init_parallel, packed_facts
from executor.engine.profiler import Profiler
from executor.engine.request import Sequence
from executor.engine.sampling import choose
from executor.engine.scheduler import make_scheduler
from executor.engine.settings import platform_settings
from executor.engine.shadows import make_offload, open_arena, write_offload
from executor.job.prompts import encode_prompts
from executor.job.report import Completion, Timings, make_report
from executor.planning.host_memory import check_host_memory
from executor.planning.times import WARM_UP_TOKENS, PlannedRun
from executor.platform import load_platform
from models.batch import Batch
from models.build import Build
from models.layers import layers_of

Step = Callable[[Batch], Tensor]


class CausalLM(Protocol):
    """What the runner needs of a model; it is also an nn.Module."""

    def prefill(self, batch: Batch) -> Tensor: ...
    def decode(self, batch: Batch) -> Tensor: ...
    def ignored_weights(self) -> frozenset[str]: ...


class ModelRunner(ABC):
    def __init__(self, case: Case, results: Path, ranks: RankEnv):
        self.case, self.results, self.ranks = case, results, ranks
        self.folder = model_folder(case)
        self.config: Any = load_model_config(case)
        self.profiler = self.define_profiler()
        self.timings = Timings()
        self.packed_cache: Callable[..., PackedCache] = PackedCache

    @abstractmethod
    def build_model(self, build: Build) -> CausalLM:
        """The model of `self.config`, its parameters not yet filled."""

    def setup(self) -> None:
        self.init_device()
        self.init_model()
        self.compile_model()

    def init_device(self) -> None:
        self.platform = load_platform(self.case.platform)(platform_settings(self.case), self.ranks)
        self.parallel = init_parallel(self.case, self.ranks, self.platform)
        print(
            f"rank {self.ranks.rank}/{self.ranks.world_size} on {self.platform.name}: "
            f"attn_tp {self.parallel.attn_tp.rank}/{self.parallel.attn_tp.size}, "
            f"attn_dp {self.parallel.attn_dp.rank}/{self.parallel.attn_dp.size}, "
            f"moe_tp {self.parallel.moe_tp.rank}/{self.parallel.moe_tp.size}, "
            f"moe_ep {self.parallel.moe_ep.rank}/{self.parallel.moe_ep.size}"
        )

    def init_model(self) -> None:
        case, start = self.case, time.perf_counter()
        if PLATFORMS[case.platform].is_host and not case.model_config.with_ckpt:
            check_host_memory(case, self.ranks.local_world_size)
        self.planned = None
        if case.offload_config.mode != "none":
            self.planned = PlannedRun(case, self.ranks, self.parallel.world, self.platform)
        self.offload = make_offload(case, self.planned.choices, self.platform, self.config) if self.planned else None
        build = build_of(case, self.platform.ops, self.parallel, self.platform.device, self.platform.quantised_head)
        build = dataclasses.replace(build, offload=self.offload)
        self.model = self.build_model(build)
        module = self._module()
        self.kernels = self.platform.kernels(module)
        for what, kernel in self.kernels.items() if self.ranks.rank == 0 else ():
            print(f"{what}: {kernel}")
        self._load_weights(module)
        self.stop_ids = stop_ids(self.folder, self.config.eos_token_ids)
        self.scheduler = make_scheduler(case)
        if self.offload:
            pages = open_arena(case, build, module, self.offload, self.scheduler.pages)
            self.scheduler = make_scheduler(case, pages, self.parallel.attn_dp.rank)
        else:
            bind_caches(module, case, build, self.scheduler.pages)
        size = sum(layer.nbytes for _, layer in layers_of(module))
        print(f"model ready: {size / 1e6:.1f} MB of weights on this rank, {time.perf_counter() - start:.2f} s")

    def compile_model(self) -> None:
        self.decode: Step = self.graph_compile()

    def graph_compile(self) -> Step:
        """The decode step op by op; a model's runner overrides this to make graphs of it."""
        return lambda batch: self.model.decode(batch.to(self.platform.device))

    def define_profiler(self) -> Profiler:
        return Profiler(self.case.model_config.enable_profiler, self.results, self.ranks.rank)

    def model_input_prepare(
        self, sequences: list[Sequence], all_logits: bool = False, is_prefill: bool = True
    ) -> Batch:
        """Reserve cache pages for the sequences' next tokens and pack those of this rank's group."""
        self.scheduler.reserve(sequences)
        group, pools = self.parallel.attn_dp.rank, self.scheduler.pools
        live = tokens = tuple(sum(s.new_tokens for s in sequences if s.group == g) for g in range(len(pools)))
        mine = [s for s in sequences if s.group == group]
        rows = 0 if is_prefill else self.platform.padded_rows(max(tokens))
        if rows:
            tokens = (rows,) * len(pools)
        batch = pack(self.platform.ops, mine, pools[group], tokens, self.scheduler.table_width, all_logits, rows)
        if self.offload:
            self.offload.started(tokens, live)
        return batch

    @torch.inference_mode()
    def model_inference(self, batch: Batch, is_prefill: bool) -> Tensor:
        """Logits of this rank's group, perhaps still in the making: reading the chosen tokens waits for them."""
        with self.profiler.step("prefill" if is_prefill else "decode"):
            return self.model.prefill(batch.to(self.platform.device)) if is_prefill else self.decode(batch)

    def model_output_process(self, logits: Tensor, sequences: list[Sequence]) -> None:
        """Choose each sequence's next token, tell the other data-parallel groups, and mark who stops."""
        dp = self.parallel.attn_dp
        generators = [s.generator for s in sequences if s.group == dp.rank]
        chosen = choose(self.platform.ops, logits[: len(generators)], self.case.sampling_config, generators)
        counts = tuple(sum(s.group == g for s in sequences) for g in range(dp.size))
        self.append_tokens(sequences, dp.gather_rows(chosen, counts).tolist())

    def append_tokens(self, sequences: list[Sequence], tokens: list[int]) -> None:
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.cached = len(sequence.ids)
            sequence.ids.append(token)
            if token in self.stop_ids and not self.case.sampling_config.ignore_eos:
                sequence.finish_reason = "stop"
            elif len(sequence.generated) >= sequence.max_new_tokens:
                sequence.finish_reason = "length"

    def model_generate(self, prompts: list[tuple[str, list[int]]], warm_up: bool = False) -> list[Sequence]:
        """Run every prompt (text, ids) to its end. A warm-up makes a few tokens of as many prompts as run together."""
        batch_size = self.case.data_config.batch_size
        sequences = [self.new_sequence(i, *prompt) for i, prompt in enumerate(prompts)]
        if warm_up:
            sequences = sequences[:batch_size]
            for sequence in sequences:
                sequence.max_new_tokens = min(WARM_UP_TOKENS if self.offload else 2, sequence.max_new_tokens)
        for sequence in sequences:
            self.scheduler.add(sequence)
        silent = warm_up or self.ranks.rank > 0
        total = sum(s.max_new_tokens for s in sequences)
        self.timings = Timings()
        bar = tqdm(total=total, desc="generating", unit="token", disable=silent or None, leave=False)
        with bar, self.platform.watched():
            while self.scheduler.waiting or self.scheduler.running:
                bar.update(self.advance())
        return sequences

    def advance(self) -> int:
        """First tokens of whoever is admitted now, then one more of all that run. -> how many"""
        admitted = self.scheduler.admit()
        if admitted:
            self._prefill(admitted)
        running = len(self.scheduler.running)
        if running:
            self._decode(self.scheduler.running)
        return len(admitted) + running

    def run(self) -> dict[str, Any]:
        """Set up, generate every prompt of the case, and report."""
        tokenizer = open_tokenizer(self.folder, self.config.vocab_size, bool(self.case.data_config.prompts))
        if self.case.data_config.prompts and tokenizer:
            prompts = list(zip(self.case.data_config.prompts, encode_prompts(self.case, tokenizer), strict=True))
        else:
            prompts = self._random_prompts()
        self.setup()
        if self.case.data_config.warm_up:
            self.model_generate(prompts, warm_up=True)
            self.profiler = self.define_profiler()
        if self.offload and self.planned:
            self.planned.begin(self.offload, self.timings.decode_steps if self.case.data_config.warm_up else [])
        sequences = self.model_generate(prompts)
        completions = [
            Completion(s.prompt, tokenizer.decode(s.generated) if tokenizer else "", s.generated, s.finish_reason)
            for s in sequences
        ]
        peak = torch.tensor([self.platform.peak_memory_bytes()], device=self.platform.device)
        peaks = self.parallel.world.gather_rows(peak, (1,) * self.case.world_size)
        report = make_report(self.case, completions, self.timings, int(peaks.max()), self.kernels)
        if self.offload and self.planned:
            outcome = {"plan": self.planned.end(self.offload, self.timings.decode_steps)}
            where = self.results, self.parallel.world, self.platform.device
            report["offload"] = write_offload(self.offload, *where) | outcome
        return report

    def new_sequence(self, index: int, prompt: str, ids: list[int]) -> Sequence:
        generator = torch.Generator().manual_seed(self.case.sampling_config.seed + index)
        return Sequence(index, prompt, list(ids), len(ids), self.case.data_config.max_new_tokens, generator)

    def _load_weights(self, module: nn.Module) -> None:
        settings, progress = self.case.quantization, self.ranks.rank == 0
        if not self.case.model_config.with_ckpt:
            return random_weights(module, seed=self.ranks.rank)
        cache = None
        if settings.method in ("q8", "q4") and settings.keep_packed and PLATFORMS[self.case.platform].keeps_packed:
            cache = self.packed_cache(packed_facts(self.case), self.folder, self.ranks.rank, module)
            if cache.load(progress):
                return None
        start, scheme = time.perf_counter(), read_scheme(self.folder)
        read = load_checkpoint(module, self.folder, scheme, self.model.ignored_weights(), progress)
        seconds = time.perf_counter() - start
        print(f"checkpoint: {scheme.title}; {read / 1e6:.1f} MB read at {read / 1e9 / seconds:.2f} GB/s")
        if cache:
            cache.save()

    def prefill_steps(self, sequences: list[Sequence]) -> Iterator[tuple[list[Sequence], Tensor]]:
        """Prefill all `sequences`, in one step or, by chunks, in several; earlier prompts finish first.

        Yields those that a step has finished, with the logits of the ones in this rank's group.
        """
        waiting = list(sequences)
        while waiting:
            part = self._next_chunk(waiting)
            with self._offloaded(decode=False):
                logits = self.model_inference(self.model_input_prepare(part), is_prefill=True)
            done = [s.end == len(s.ids) for s in part]
            mine = [d for s, d in zip(part, done, strict=True) if s.group == self.parallel.attn_dp.rank]
            for sequence in part:
                sequence.cached, sequence.most = sequence.end, 0
            finished = [s for s, d in zip(part, done, strict=True) if d]
            if finished:
                yield finished, logits[mine]
            waiting = [s for s in waiting if s not in finished]

    def _prefill(self, sequences: list[Sequence]) -> None:
        """First tokens of all `sequences`."""
        start = time.perf_counter()
        prompt_tokens = sum(s.new_tokens for s in sequences)
        for finished, logits in self.prefill_steps(sequences):
            self.model_output_process(logits, finished)
            self.timings.first_token += [time.perf_counter() - start] * len(finished)
        self.timings.add_prefill(prompt_tokens, time.perf_counter() - start)
        self.scheduler.retire()

    def _next_chunk(self, waiting: list[Sequence]) -> list[Sequence]:
        """The sequences of the next prefill step, each with the number of tokens it may take."""
        budget = self.case.data_config.chunked_prefill_size
        if not budget:
            return waiting
        left = [budget] * self.parallel.attn_dp.size
        part = []
        for sequence in waiting:
            if left[sequence.group]:
                sequence.most = left[sequence.group]
                left[sequence.group] -= sequence.new_tokens
                part.append(sequence)
        return part

    def _decode(self, sequences: list[Sequence]) -> None:
        start = time.perf_counter()
        with self._offloaded(decode=True):
            logits = self.model_inference(self.model_input_prepare(sequences, is_prefill=False), is_prefill=False)
            self.model_output_process(logits, sequences)
        self.timings.add_decode(len(sequences), time.perf_counter() - start)
        self.scheduler.retire()

    @contextmanager
    def _offloaded(self, decode: bool) -> Iterator[None]:
        """Around a step, pages taken to tokens read."""
        if self.offload:
            self.offload.begin()
        yield
        if self.offload:
            self.offload.end(decode)

    def _random_prompts(self) -> list[tuple[str, list[int]]]:
        """For benchmarks: `batch_size` prompts of `input_max_len` random tokens, each its own."""
        generator = torch.Generator().manual_seed(self.case.sampling_config.seed)
        shape = (self.case.data_config.batch_size, self.case.data_config.input_max_len)
        return [("", row) for row in torch.randint(self.config.vocab_size, shape, generator=generator).tolist()]

    def _module(self) -> nn.Module:
        if not isinstance(self.model, nn.Module):
            raise TypeError("build_model must return an nn.Module")
        return self.model
