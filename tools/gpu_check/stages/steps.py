"""Decode of 8 layers of Qwen3-30B-A3B with random 4-bit weights, all experts resident: the time of a step, of the GPU
and of the host, and the launches that it takes."""

import functools
import statistics
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from umbra.executor.config.load import load_case
from umbra.executor.model_runner import make_runner
from umbra.executor.plan.resolve import resolve
from umbra.models.batch import Batch
from umbra.tools.gpu_check.stages.demos import ONE_RANK
from umbra.tools.npu_check.outcome import Check, Passed, Skipped

SHAPE = "bench_30b_shape_cpu"
STEPS, WARM = 200, 5
LENGTH = 100  # tokens of a sequence before the first step


def checks() -> list[Check]:
    return [Check(f"{rows} rows", partial(decode, rows)) for rows in (1, 4, 8)]


@functools.cache
def random_model() -> Any:
    """The runner of the model, for up to eight rows."""
    settings = ['platform="cuda"', "exe_mode=graph", "batch_size=8", "input_max_len=128", "max_new_tokens=256"]
    runner = make_runner(resolve(load_case(SHAPE, settings), silent=True), Path("results/gpu_check"), ONE_RANK)
    runner.setup()
    return runner


def decode(rows: int) -> Passed:
    """Sequences of random tokens. A step ends when its most likely tokens are on the host."""
    if not torch.cuda.is_available():
        raise Skipped("torch sees no GPU")
    runner = random_model()
    engine, ops = runner.engine, runner.engine.platform.ops
    page, width, vocabulary = engine.packer.pool.page_size, engine.packer.table_width, runner.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    pages = torch.arange(rows * width).view(rows, width) % engine.packer.pool.padding
    whole, model, begun = [], [], []
    with torch.inference_mode():
        for number in range(WARM + STEPS):
            position = LENGTH + number
            slots = array("q", (int(pages[row, position // page]) * page + position % page for row in range(rows)))
            paged = ops.paging(
                slots, pages.clone(), array("q", range(rows + 1)), array("q", [position + 1] * rows), page
            )
            ids = torch.randint(vocabulary, (rows,), generator=generator)
            batch = Batch(ids, torch.full((rows,), position), (paged,), None, None)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            start = time.perf_counter()
            events[0].record()
            logits = engine.decode_step(batch)
            events[1].record()
            called = time.perf_counter()
            logits.argmax(-1).cpu()
            end = time.perf_counter()
            if number >= WARM:
                whole.append(1e3 * (end - start))
                begun.append(1e3 * (called - start))
                model.append(events[0].elapsed_time(events[1]))
        launches = count_launches(partial(engine.decode_step, batch))
    if launches and launches.get("cudaGraphLaunch") != 1:
        raise AssertionError(f"a step is not one launch of a graph: {launches}")
    ms = statistics.median(whole)
    return Passed(
        f"{rows * 1e3 / ms:.0f} tokens/s, {ms:.2f} ms a step",
        {
            "ms a step": round(ms, 3),
            "ms of the GPU": round(statistics.median(model), 3),
            "ms until the call returns": round(statistics.median(begun), 3),
            "calls of a step": launches,
        },
    )


def count_launches(step: Callable[[], Any]) -> dict[str, int]:
    """The calls of CUDA's runtime that start work, by name, and the number of kernels that ran;
    nothing where the machine forbids to profile."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    counts: dict[str, int] = {}
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            counts["kernels and copies"] = counts.get("kernels and copies", 0) + 1
        elif "Launch" in event.name or "Memcpy" in event.name:
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts
