"""A job whose ranks run a case without shadow experts, then with them. Each rank moves experts at random, and some
copies take longer; tokens and logits must equal those without shadow experts, bit for bit. Writes the moves of each
rank."""

import argparse
import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch

from tests.fakes.shadow_experts import CopyingPlatform, any_swaps
from umbra.commands.logits import collect_logits
from umbra.cpu_offload.manager import ShadowExperts
from umbra.executor.config.case import Case, OffloadSettings
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.launch.join import init_parallel
from umbra.executor.launch.rank import run_rank
from umbra.executor.model_runner import ModelRunner, make_runner
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.platform.cpu.device import CpuPlatform
from umbra.executor.platform.cpu.shadow_device import CpuDevice

PROMPTS = [("a", [5, 17, 3]), ("b", [7]), ("c", list(range(30, 53))), ("d", [11, 12]), ("e", [90, 3, 3, 8])]


class SlowDevice(CpuDevice):
    """Reports a copy as done some steps after it is."""

    def done(self, ticket: int) -> bool:
        return random.random() < 0.3 and super().done(ticket)


class SlowPlatform(CopyingPlatform):
    device_class = SlowDevice


def done_by(shadows: ShadowExperts) -> dict[str, Any]:
    report = shadows.history.report()
    steps = [step.resident.tobytes().hex() for step in shadows.history.steps]
    kept = "hit_rate", "copies", "evictions_for_cache"
    return {"mode": shadows.settings.mode, "residents": steps, **{key: report[key] for key in kept}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("arena_kb", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--stop", action="store_true", help="rank 1's shadow pool before the first step")
    parser.add_argument("--graph", action="store_true", help="not op by op as well")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--resolved", help="the launcher's case, which this one sets otherwise for each of its runs")
    args = parser.parse_args()
    case = load_case(args.case, args.overrides)
    # Where the pool is stopped nothing is streamed, so that the first step needs it.
    common: dict[str, Any] = {"measure_s": 0.05, "stream_tokens": 0 if args.stop else None}
    modes = (
        OffloadSettings(mode="elastic", arena_mb=args.arena_kb / 1024, **common),
        OffloadSettings(mode="fixed", slots=3, **common),
    )

    def body(results: Path, ranks: RankEnv) -> None:
        random.seed(ranks.rank)
        platform = SlowPlatform if ranks.rank % 2 else CpuPlatform
        parallel = init_parallel(case, ranks, platform(platform_settings(case), ranks))
        rows, stop = [], args.stop and ranks.rank == 1

        def outcome(case: Case) -> tuple[ModelRunner, list[list[int]], dict[str, Any]]:
            runner = make_runner(case, results, ranks)
            runner.setup(platform, parallel)
            if runner.engine.shadows and stop:
                runner.engine.shadows.pool.stop()
            if runner.engine.shadows:
                runner.engine.shadows.residency.swaps = any_swaps  # type: ignore[method-assign]
            tokens = [s.ids.tolist() for s in runner.model_generate(PROMPTS)]
            together = [ids for _, ids in PROMPTS[: case.data_config.batch_size]]
            return runner, tokens, collect_logits(runner, together, 2)

        for exe_mode in ("graph",) if args.graph else ("eager", "graph"):
            plain = dataclasses.replace(case, exe_mode=exe_mode)
            _, expected, logits = outcome(plain)
            for settings in modes:
                own = dataclasses.replace(plain, offload_config=settings)
                runner, tokens, ours = outcome(own)
                if tokens != expected or not all(np.array_equal(ours[name], logits[name]) for name in logits):
                    raise AssertionError(f"{exe_mode}, {settings}: {tokens}, not {expected}, or other logits")
                if runner.engine.shadows:
                    rows.append(done_by(runner.engine.shadows))
        # Not gathered over torch's default group: gloo ends a process that closes it while another still reads.
        (args.out / f"rank{ranks.rank}.json").write_text(json.dumps(rows))

    with torch.inference_mode():
        run_rank(case, args.results, body)


if __name__ == "__main__":
    main()
