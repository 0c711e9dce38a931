"""The native engine under ThreadSanitizer while the scheduler runs random traffic on tiny models: requests that come,
are preempted and aborted, prefixes, drafts, sampling, elastic shadow experts, steps op by op and from the tape.

    .venv/bin/python -m tests.ops.cpu.traffic [--steps N] [--seed N]      builds what it needs and runs itself under it

Python and PyTorch are not built with the sanitizer, so only what the native module accesses is seen, and what either of
them allocates, frees or copies through libc. tsan.supp names what is theirs."""

import argparse
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.ops.cpu.native.build import CACHE, SOURCES, TESTS, core_sources, module_under, project_with, run

# exe_mode, shadow experts, drafts, family
MODES = [("graph", "elastic", 2, "qwen3_moe"), ("eager", "fixed", 0, "qwen3_moe"), ("graph", "none", 1, "deepseek_v3")]
DONE = re.compile(r"\d+ steps, \d+ preempted, \d+ aborted, \d+ tokens")


def traffic(
    folder: Path, exe_mode: str, offload: str, drafts: int, family: str, steps: int, choose: random.Random
) -> str:
    """Runs `steps` steps and returns what they did."""
    from tests.fakes.drafts import lookup
    from tests.tiny import make_runner, tiny_case
    from umbra.executor.engine.schedule.request import Request, SamplingParams
    from umbra.executor.engine.step.loop import Loop

    shadow: dict[str, dict[str, Any]] = {
        "none": {},
        "fixed": {"slots": 5, "stream_tokens": 8},
        "elastic": {"arena_mb": 40 / 1024, "max_swaps": 8},
    }
    case = tiny_case(
        folder,
        folder / family,
        model_name=family,
        exe_mode=exe_mode,
        threads=2,
        data_config={"batch_size": 5, "max_new_tokens": 24, "chunked_prefill_size": 16},
        draft_config=lookup(drafts),
        offload_config={"mode": offload, "measure_s": 0.01, "shadow_threads": 2} | shadow[offload]
        if offload != "none"
        else {"mode": "none"},
        serve_config={"reserve": 0, "prefix_floor": 4},
    )
    runner = make_runner(case, folder)
    loop = Loop(runner.engine, runner.loop.stop_ids, serving=True)
    preempted = aborted = tokens = 0
    running: set[int] = set()
    stems = [[choose.randrange(96) for _ in range(12)] for _ in range(3)]
    for _ in range(steps):
        while len(running) < 9 and choose.random() < 0.6:
            tail = [choose.randrange(96) for _ in range(choose.randint(4, 36))]
            prompt = tuple((choose.choice(stems) if choose.random() < 0.5 else []) + tail)
            sampling = SamplingParams(
                max_tokens=choose.randint(4, 24),
                temperature=choose.choice([0.0, 1.0]),
                seed=choose.randrange(99),
                top_p=choose.choice([1.0, 0.8]),
                top_k=choose.choice([None, 5]),
                ignore_eos=True,
                frequency_penalty=choose.choice([0.0, 0.3]),
                logprobs=choose.choice([None, 2]),
            )
            running.add(loop.submit(Request(prompt, sampling, priority=choose.randrange(2))).id)
        if running and choose.random() < 0.1:
            loop.abort(choose.choice(sorted(running)))
            aborted += 1
        before = {s.id for s in loop.scheduler.running}
        for event in loop.step():
            tokens += len(event.tokens)
            if event.finish_reason:
                running.discard(event.id)
        preempted += len(before & {s.id for s in loop.scheduler.waiting})
    return f"{exe_mode}, {offload}: {steps} steps, {preempted} preempted, {aborted} aborted, {tokens} tokens"


def built(racy: bool = False) -> Path:
    """The native module with ThreadSanitizer. With `racy` the pool's workers no longer publish what they wrote."""
    sources = core_sources(platform.machine())
    if racy:
        pool = SOURCES / "runtime" / "pool.cpp"
        right, wrong = (
            "running_.fetch_sub(1, std::memory_order_seq_cst)",
            "running_.fetch_sub(1, std::memory_order_relaxed)",
        )
        text = pool.read_text()
        assert right in text
        planted = CACHE / "racy_pool.cpp"
        planted.write_text(text.replace(right, wrong))
        sources[sources.index(pool)] = planted
    return module_under("thread", sources)


def under_sanitizer(module: Path, tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """This file's `main` in a copy of the project in `tree`, whose native module is `module`."""
    project_with(module, tree)
    library = run("g++", "-print-file-name=libtsan.so").stdout.strip()
    options = f"suppressions={TESTS / 'tsan.supp'} ignore_noninstrumented_modules=1 halt_on_error=0 exitcode=66"
    environment = os.environ | {"LD_PRELOAD": library, "TSAN_OPTIONS": options, "OMP_NUM_THREADS": "1"}
    # Older sanitizers cannot live with much address randomisation.
    command = ["setarch", "-R", sys.executable, "-m", "tests.ops.cpu.traffic", "--inside", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tree, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="of each mode")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not args.inside:
            done = under_sanitizer(built(), Path(folder) / "tree", "--steps", str(args.steps), "--seed", str(args.seed))
            print(done.stdout, done.stderr[-20000:], sep="\n", end="")
            sys.exit(done.returncode)
        from tests.tiny import save_tiny, save_tiny_of

        save_tiny(Path(folder) / "qwen3_moe", eos_token_id=None, moe_intermediate_size=32)
        save_tiny_of(Path(folder) / "deepseek_v3", "deepseek_v3", eos_token_id=None)
        for mode in MODES:
            print(traffic(Path(folder), *mode, args.steps, random.Random(args.seed)), flush=True)


if __name__ == "__main__":
    main()
