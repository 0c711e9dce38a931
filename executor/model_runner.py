"""Drives one rank of one case: sets up device, planner and engine, runs the prompts through the loop, and reports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from umbra.cpu_offload.planner.planned_run import WARM_UP_TOKENS
from umbra.executor.checkpoint.packed import PackedCache
from umbra.executor.checkpoint.stop_ids import stop_ids
from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_model_config, model_folder
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.engine import Engine, ForwardStep
from umbra.executor.engine.step.loop import Loop
from umbra.executor.engine.step.profiler import Profiler
from umbra.executor.engine.step.timings import Timings
from umbra.executor.launch.join import init_parallel
from umbra.executor.plan.host_memory import check_host_memory
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.plan.shadows import plan_run
from umbra.executor.plan.sketch import sketch_of
from umbra.executor.platform.base import Platform
from umbra.executor.platform.registry import load_platform
from umbra.executor.platform.settings import PlatformSettings
from umbra.executor.run.prompts import encode_prompts
from umbra.executor.run.report import Completion, make_report
from umbra.executor.run.shadow_report import write_shadow_report
from umbra.models.tokenizers import open_tokenizer
from umbra.ops.parallel.groups import Parallel

PlatformMaker = Callable[[PlatformSettings, RankEnv], Platform]


class ModelRunner:
    def __init__(self, case: Case, results: Path, ranks: RankEnv):
        self.case, self.results, self.ranks = case, results, ranks
        self.folder = model_folder(case)
        self.config: Any = load_model_config(case)
        self.packed_cache: Callable[..., PackedCache] = PackedCache

    def setup(self, make_platform: PlatformMaker | None = None, parallel: Parallel | None = None) -> None:
        """Make the device this process's own, plan, load the model, and prepare its decode step.

        `make_platform` replaces the class of the platform that the case names. `parallel` has this rank's groups, if
        an earlier run of this process has made them already.
        """
        case, ranks = self.case, self.ranks
        platform = (make_platform or load_platform(case.platform))(platform_settings(case), ranks)
        parallel = parallel or init_parallel(case, ranks, platform)
        print(
            f"rank {ranks.rank}/{ranks.world_size} on {platform.name}: "
            f"attn_tp {parallel.attn_tp.rank}/{parallel.attn_tp.size}, "
            f"attn_dp {parallel.attn_dp.rank}/{parallel.attn_dp.size}, "
            f"moe_tp {parallel.moe_tp.rank}/{parallel.moe_tp.size}, "
            f"moe_ep {parallel.moe_ep.rank}/{parallel.moe_ep.size}"
        )
        if not PLATFORMS[case.platform].own_memory:
            check_host_memory(case, ranks.local_world_size, sketch_of(case, config=self.config))
        self.planned = None
        if case.offload_config.mode != "none":
            self.planned = plan_run(case, ranks, parallel.world, platform)
        choices = self.planned.choices if self.planned else None
        self.engine = Engine(case, platform, parallel, self.config, self.define_profiler(), choices, self.packed_cache)
        self.engine.decode_step = self.graph_compile()
        self.loop = Loop(self.engine, stop_ids(self.folder, self.config.eos_token_ids))

    def graph_compile(self) -> ForwardStep:
        """Returns the decode step that `setup` gives to the engine: here the model op by op, as prefill always is."""
        return self.engine.eager_step

    def define_profiler(self) -> Profiler:
        return Profiler(self.case.model_config.enable_profiler, self.results, self.ranks.rank)

    def model_generate(self, prompts: list[tuple[str, list[int]]], warm_up: bool = False) -> list[Sequence]:
        """Run every prompt (text, ids) to its end. A warm-up runs only as many prompts as fit into a batch, for a few
        tokens each."""
        most = (WARM_UP_TOKENS if self.engine.shadows else 2) if warm_up else self.case.data_config.max_new_tokens
        asked = prompts[: self.case.data_config.batch_size] if warm_up else prompts
        sequences = [self.loop.submit(self.request(i, ids, most), i) for i, (_, ids) in enumerate(asked)]
        self.loop.timings = Timings()
        silent = warm_up or self.ranks.rank > 0
        total = sum(s.request.sampling.max_tokens for s in sequences)
        bar = tqdm(total=total, desc="generating", unit="token", disable=silent or None, leave=False)
        with bar, self.engine.platform.watched():
            while not self.loop.idle:
                bar.update(sum(len(event.tokens) for event in self.loop.step()))
        return sequences

    def request(self, index: int, ids: list[int], most: int) -> Request:
        """Prompt `index` of the case, for at most `most` new tokens."""
        sampling = self.case.sampling_config
        params = SamplingParams(
            max_tokens=min(most, self.case.data_config.max_new_tokens),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed + index,
            ignore_eos=sampling.ignore_eos,
        )
        return Request(tuple(ids), params)

    def run(self) -> dict[str, Any]:
        """Set up, generate every prompt of the case, and report."""
        tokenizer = open_tokenizer(
            self.folder,
            bool(self.case.data_config.prompts),
            self.config.vocab_size,
            self.case.model_config.chat_template,
        )
        if self.case.data_config.prompts and tokenizer:
            prompts = list(zip(self.case.data_config.prompts, encode_prompts(self.case, tokenizer), strict=True))
        else:
            prompts = self._random_prompts()
        self.setup()
        engine, shadows = self.engine, self.engine.shadows
        if self.case.data_config.warm_up:
            self.model_generate(prompts, warm_up=True)
            engine.profiler = self.define_profiler()
        if shadows and self.planned:
            self.planned.begin(shadows, self.loop.timings.pure_decode_steps)
        sequences = self.model_generate(prompts)
        completions = [
            Completion(text, tokenizer.decode(s.generated) if tokenizer else "", s.generated, s.finish_reason)
            for (text, _), s in zip(prompts, sequences, strict=True)
        ]
        world, device = engine.parallel.world, engine.platform.device
        peak = torch.tensor([engine.platform.peak_memory_bytes()], device=device)
        peaks = world.gather_rows(peak, (1,) * self.case.world_size)
        placements = engine.rebalancing.report() if engine.rebalancing else []
        report = make_report(self.case, completions, self.loop.timings, int(peaks.max()), engine.kernels, placements)
        if shadows and self.planned:
            outcome = {"plan": self.planned.end(shadows, self.loop.timings.pure_decode_steps)}
            report["offload"] = write_shadow_report(shadows, self.results, world, device) | outcome
        return report

    def _random_prompts(self) -> list[tuple[str, list[int]]]:
        """Returns `batch_size` different prompts of `input_max_len` random tokens, for benchmarks."""
        generator = torch.Generator().manual_seed(self.case.sampling_config.seed)
        shape = (self.case.data_config.batch_size, self.case.data_config.input_max_len)
        return [("", row) for row in torch.randint(self.config.vocab_size, shape, generator=generator).tolist()]


class Qwen3MoeRunner(ModelRunner):
    """The runner of graph modes. It has the name of the first family whose decode step became a graph; all do now."""

    def graph_compile(self) -> ForwardStep:
        """Returns the decode step as static graphs, one for each number of sequences."""
        return self.engine.graph_step()


def make_runner(case: Case, results: Path, ranks: RankEnv) -> ModelRunner:
    """Returns the runner of a resolved case's rank for its `exe_mode`; it has no device before `setup`."""
    runner = ModelRunner if case.exe_mode == "eager" else Qwen3MoeRunner
    return runner(case, results, ranks)
